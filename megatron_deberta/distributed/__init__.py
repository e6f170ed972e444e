"""Ranks, process groups, differentiable collectives and parallel layers; knows no DeBERTa."""
