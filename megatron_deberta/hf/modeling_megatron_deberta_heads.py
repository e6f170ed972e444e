"""DeBERTa for transformers: heads of fine-tuned models, and the autoregressive language model.

``megatron-deberta convert --to hf`` copies this file into exports for which transformers has no
class, beside ``modeling_megatron_deberta.py``. The heads and their losses are those of
transformers' DeBERTa-v2 classes, on the encoder of that file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    DebertaConfig,
    DebertaV2ForMultipleChoice,
    DebertaV2ForQuestionAnswering,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import ContextPooler

from .modeling_megatron_deberta import (
    LanguageModel,
    MegatronDebertaConfig,
    MegatronDebertaModel,
    MegatronDebertaPreTrainedModel,
    refuse,
)


class TaskModel(MegatronDebertaPreTrainedModel):
    """Encoder with a head on every token, without ``forward``."""

    head = "classifier"

    def __init__(self, config: PretrainedConfig) -> None:
        # Not the stock class's, which builds the stock encoder.
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.deberta = MegatronDebertaModel(config)
        self.build_head(config)
        self.post_init()

    def build_head(self, config: PretrainedConfig) -> None:
        """Add the modules above the encoder, with the stock class's names."""
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.add_module(self.head, nn.Linear(config.hidden_size, config.num_labels))


class RowModel(TaskModel):
    """Encoder with a head on the first token, without ``forward``."""

    num_outputs: int | None = None

    def build_head(self, config: PretrainedConfig) -> None:
        """Add pooler and classifier."""
        outputs = self.num_outputs or config.num_labels
        self.pooler = ContextPooler(config)
        self.dropout = nn.Dropout(config.cls_dropout)
        self.classifier = nn.Linear(config.hidden_size, outputs)


class MegatronDebertaForSequenceClassification(RowModel, DebertaV2ForSequenceClassification):
    """Classification or regression of rows."""

    config_class = MegatronDebertaConfig


class MegatronDebertaForMultipleChoice(RowModel, DebertaV2ForMultipleChoice):
    """One logit per choice."""

    config_class = MegatronDebertaConfig
    num_outputs = 1


class DebertaForMultipleChoice(MegatronDebertaForMultipleChoice):
    """The same for the type ``deberta``, for which transformers has no such class."""

    config_class = DebertaConfig


class MegatronDebertaForTokenClassification(TaskModel, DebertaV2ForTokenClassification):
    """Classification of tokens."""

    config_class = MegatronDebertaConfig


class MegatronDebertaForQuestionAnswering(TaskModel, DebertaV2ForQuestionAnswering):
    """First and last token of an answer."""

    config_class = MegatronDebertaConfig
    head = "qa_outputs"


class MegatronDebertaForCausalLM(LanguageModel, GenerationMixin):
    """Autoregressive language model: no position sees a later one, each predicts the next token.

    Source: He et al. 2021, arXiv:2006.03654, appendix A.4. ``generate`` runs the whole sequence for
    each new token.
    """

    config_class = MegatronDebertaConfig

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **unsupported: Any,
    ) -> Any:
        """Predict the token after each.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: ``[B, N]``, non-zero = real token; None: no padding.
            token_type_ids: int64 ``[B, N]`` segments; ignored if the model has no table for them.
            labels: int64 ``[B, N]``, tokens as in ``input_ids``, -100 = ignored; they are shifted
                here and add the mean ``loss``.
            output_hidden_states: also return the encoder's hidden states.
            return_dict: False returns a tuple.
            unsupported: other arguments of transformers' models; None or False.

        Returns:
            ``CausalLMOutput`` with ``logits`` ``[B, N, V]``.

        Raises:
            ValueError: another argument is given, a tensor has a wrong shape or values out of
                range, or rows are padded on the left, which moves
                absolute positions.
        """
        refuse(unsupported)
        mask = self.deberta.checked_mask(
            input_ids, attention_mask, token_type_ids, labels, decodes=True
        )
        if not torch.all(mask[:, 0]):
            raise ValueError("attention_mask: rows are padded on the left; pad on the right")
        logits, states = self.predict(input_ids, mask, token_type_ids, causal=True)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return_states = output_hidden_states or self.config.output_hidden_states
        out = CausalLMOutput(loss, logits, tuple(states) if return_states else None)
        return out.to_tuple() if return_dict is False else out

    def prepare_inputs_for_generation(self, input_ids: Tensor, *_: Any, **inputs: Any) -> Any:
        """Return the whole sequence for each new token; there is no cache.

        Args:
            input_ids: int64 ``[B, N]``, all tokens so far.
            **inputs: of ``generate``; the attention mask is read.
        """
        return {"input_ids": input_ids, "attention_mask": inputs.get("attention_mask")}
