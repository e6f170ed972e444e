"""DeBERTa on one device: plain PyTorch that knows no rank and no process group.

Where tensor parallelism will later cut, the modules of ``seams.py`` mark the place; on one device
they do nothing. Shape letters used throughout: B batch, N sequence length, R rows (tokens held by
a tensor, all N or those the mask decoder picked), D hidden size, A attention heads, H head size,
S position slots (2 * span), V vocabulary.
"""

from megatron_deberta.model.deberta import DebertaForPretraining, DebertaModel, RuntimeOptions
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.model.shapes import count_parameters, parameter_shapes

__all__ = [
    "DebertaForPretraining",
    "DebertaModel",
    "DropoutSeeds",
    "RuntimeOptions",
    "count_parameters",
    "parameter_shapes",
]
