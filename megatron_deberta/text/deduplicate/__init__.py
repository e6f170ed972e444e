"""Removes exact and near duplicates from a corpus; ``pipeline.deduplicate`` is the entry."""
