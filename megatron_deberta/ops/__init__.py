"""The disentangled attention operator, its backends and the dropout bits.

In reading order: ``arguments`` and ``reference`` (the formula), ``relative_positions``,
``dropout_bits``, ``position_terms``, ``chunked`` (CPUs; GPUs in ``batched``), ``dispatch``; then
the faster backends ``native`` (CPUs) and ``triton`` (GPUs). ``cross_entropy`` is the vocabulary's
loss.
"""

from megatron_deberta.ops.dispatch import disentangled_attention
from megatron_deberta.ops.relative_positions import RelativePositions

__all__ = ["RelativePositions", "disentangled_attention"]
