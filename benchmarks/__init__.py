"""Measurements of speed, memory and learning; run them with ``python -m``."""
