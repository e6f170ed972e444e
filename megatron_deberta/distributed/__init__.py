"""Ranks, process groups, differentiable collectives and tensor-parallel layers.

In reading order: ``environment`` (ranks of a launcher), ``topology`` (process groups),
``control`` (small collectives of the host), ``collectives`` (differentiable ones),
``tensor_parallel`` (linear layers and embeddings); then ``parallelize``: ``plan`` (which dimension
of a parameter is split), ``apply`` (replaces the layers), ``build`` (this rank's model).
"""
