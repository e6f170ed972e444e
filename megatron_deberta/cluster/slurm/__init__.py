"""SLURM: submission, the job script, the history of a run's jobs, its status."""
