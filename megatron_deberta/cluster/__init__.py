"""What a job does once it runs: its lock on the run's folder, its links, its place in SLURM."""
