"""Encodes text into shards; ``pipeline.preprocess`` is the entry."""
