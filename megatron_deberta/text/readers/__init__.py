"""Readers of text files: compression, record boundaries, JSON Lines, text, Parquet and Arrow."""
