"""Rows of tokens from shards: documents, blends, packing, segment pairs."""
