"""Engines (DeepSpeed and reference), optimizer, learning-rate schedule and loss scaling."""
