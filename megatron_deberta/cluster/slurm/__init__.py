"""SLURM: submission, the batch job, the history of a run's job attempts, and its status."""
