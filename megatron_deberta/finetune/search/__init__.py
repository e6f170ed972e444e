"""Hyper-parameter searches: cells of a grid, each a fine-tuning run per seed."""
