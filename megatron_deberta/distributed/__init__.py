"""Ranks, process groups, differentiable collectives and tensor-parallel layers."""
