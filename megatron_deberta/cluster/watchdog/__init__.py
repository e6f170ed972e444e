"""Watchdog: heartbeats of ranks, supervisors of nodes, detection of hangs and stragglers."""
