"""From raw text to shards: readers, preprocessing, deduplication, splits."""
