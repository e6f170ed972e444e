"""The training loop.

Owns the order of things in a run: load, step, log, validate, save. Refuses mathematics, files and
communication of its own beyond sums of losses: those are in the folders below it.
"""
