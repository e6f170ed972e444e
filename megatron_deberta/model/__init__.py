"""DeBERTa on one device, in plain PyTorch.

The model contains no communication. `distributed.parallelize` replaces the modules of
``parallel_layers.py`` for tensor parallelism.

In reading order: ``inputs``, ``parallel_layers``, ``embeddings``, ``attention``, ``layers``,
``encoder`` (with the mask decoder), ``heads``, ``deberta``; then ``task_models`` and
``replaced_tokens``.

Shapes in all files: B batch, N sequence length, R rows of a hidden-state tensor (all N tokens, or
those selected by the mask decoder), D hidden size, A attention heads, H head size, S slots of the
position table (2 * span), V vocabulary.
"""

from megatron_deberta.model.deberta import (
    DebertaBackbone,
    DebertaForMaskedLM,
    DebertaForPretraining,
    DebertaModel,
    EncoderOutput,
    MaskedLMOutput,
    RuntimeOptions,
)
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.task_models import (
    DebertaForTask,
    count_parameters,
    parameter_shapes,
    task_model,
)

__all__ = [
    "DebertaBackbone",
    "DebertaForMaskedLM",
    "DebertaForPretraining",
    "DebertaForTask",
    "DebertaModel",
    "DropoutSeeds",
    "EncoderOutput",
    "MaskedLMOutput",
    "ModelInputs",
    "RuntimeOptions",
    "count_parameters",
    "parameter_shapes",
    "task_model",
]
