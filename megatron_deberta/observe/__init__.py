"""Logging, terminal view, metrics, throughput and progress of a run."""
