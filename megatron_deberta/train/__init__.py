"""Training loop: data, steps, metrics, validation, checkpoints, rollbacks."""
