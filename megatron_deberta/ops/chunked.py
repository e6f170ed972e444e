"""Disentangled attention in blocks; until they are written, the reference under this name."""

from megatron_deberta.ops.reference import attend

__all__ = ["attend"]
