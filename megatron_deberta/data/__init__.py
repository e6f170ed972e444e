"""Shards, packing, masking, sample order and loading of pretraining data."""
