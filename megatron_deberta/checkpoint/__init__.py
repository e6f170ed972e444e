"""Checkpoints: on-disk format, saving, loading, retention and the rules for resuming.

In reading order: ``layout`` (files and metadata), ``writer`` (tensor files and the commit),
``saver`` (collects the engine's shards, in the background or not), ``reader`` (one tensor, or a
slice of it), ``store`` (finds and loads), ``views`` (averages, parts and other forms of a
checkpoint), ``resume`` (which changes of a config a resume allows), ``retention``; ``local`` saves
on the nodes' own disks.

The slices of tensor-parallel ranks stay apart on disk; ``CheckpointReader.tensor`` joins them.
"""
