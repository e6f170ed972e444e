"""Ranks, process groups, differentiable collectives and tensor-parallel layers.

In reading order: ``environment`` (ranks of a launcher), ``topology`` (process groups),
``control`` (small collectives of the host), ``collectives`` (differentiable ones); then
``parallelize``: ``plan`` (which dimension of a parameter is split), ``apply`` (linear layers and
embeddings of tensor-parallel ranks, which replace the model's), ``build`` (this rank's model).
"""
