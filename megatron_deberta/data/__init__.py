"""Shards, packing, masking, sample order and loading.

Owns everything between shards on disk and the ``Batch`` the model sees. Refuses to know a
tokenizer's text side, a model or a process group: ranks come in as plain numbers.
"""
