"""Fused Triton kernels of the attention operator, for Ampere and newer GPUs."""
