"""What the benchmarks share: clocks, provenance, models."""
