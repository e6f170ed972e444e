"""Predictions of ``plan`` against dry runs."""
