"""Heartbeats of ranks, and the detection of hangs and stragglers."""
