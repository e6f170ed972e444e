"""Readers of labelled files, and the examples built from their records."""
