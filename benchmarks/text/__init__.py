"""Preprocessing and deduplication."""
