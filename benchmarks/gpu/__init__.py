"""The GPU benchmark suite."""
