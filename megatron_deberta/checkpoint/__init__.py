"""Checkpoints: on-disk format, saving, loading, retention and the rules for resuming."""
