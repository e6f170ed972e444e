"""Disentangled attention compiled for the CPU of this machine."""
