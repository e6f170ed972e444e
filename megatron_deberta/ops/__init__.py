"""The disentangled attention operator, its backends and the dropout bits."""

from megatron_deberta.ops.dispatch import disentangled_attention
from megatron_deberta.ops.relative_positions import RelativePositions

__all__ = ["RelativePositions", "disentangled_attention"]
