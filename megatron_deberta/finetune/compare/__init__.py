"""Comparison of two models: significance over examples and over seeds."""
