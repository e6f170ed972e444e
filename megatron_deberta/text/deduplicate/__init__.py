"""Finds documents that repeat others, exactly or nearly, and writes the corpus without them.

``pipeline.deduplicate`` is the entry.
"""
