"""The attention operator and its kernels."""
