"""Shards in Megatron's indexed format: reader, writer, manifest, merging and verification."""
