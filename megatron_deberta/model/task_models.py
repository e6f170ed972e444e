"""Models of labelled tasks, with the heads of transformers' classes, and shapes of all models.

Shapes: B rows, N tokens, K outputs of the head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.deberta import DebertaBackbone, DebertaForPretraining
from megatron_deberta.model.dropout import Dropout, DropoutSeeds
from megatron_deberta.model.embeddings import Perturbation
from megatron_deberta.model.heads import ContextPooler, mean_state, num_outputs
from megatron_deberta.model.inputs import ModelInputs, RowPacking
from megatron_deberta.model.replaced_tokens import DebertaDiscriminator, DebertaForReplacedTokens
from megatron_deberta.ops import RelativePositions


class DebertaForTask(DebertaBackbone):
    """Base class: an encoder with a head whose outputs are ``logits``.

    A head reads the last layer's states at every token, unless a subclass overrides ``logits`` and
    ``packed_logits``.
    """

    def _table_slots(self, length: int) -> range | None:
        """Return the slots that rows of this length use.

        Rows are often so short that projecting the whole table in every layer would cost more than
        projecting the tokens.
        """
        config = self.config
        positions = RelativePositions(config.max_relative_positions, config.position_buckets or 0)
        return positions.slots_of_length(length)

    def logits(
        self,
        inputs: ModelInputs,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Compute the head's outputs.

        Args:
            inputs: the tokens ``[B, N]``.
            seeds: dropout keys; None: no dropout.
            perturbation: of the normalised embeddings (SiFT).

        Returns:
            ``[B, K]`` for a head on rows, ``[B, N, K]`` for a head on tokens.

        Raises:
            ModelInputError: a tensor has a wrong shape, or values out of range.
        """
        self._check_inputs(inputs)
        return self.pool(self._project(self.encode(inputs, seeds, perturbation), seeds), inputs)

    def packed_logits(
        self, inputs: ModelInputs, packing: RowPacking, seeds: DropoutSeeds | None = None
    ) -> Tensor:
        """Compute the outputs of ``logits``, with hardly any computation for padding.

        Exact without dropout, which has the key of the first of the rows side by side.

        Args:
            inputs: the tokens ``[B, N]``; their mask is not read.
            packing: which of these tokens stand side by side.
            seeds: dropout keys of the B rows; None: no dropout.

        Returns:
            As ``logits``; of a head on tokens, outputs of padding have no meaning.
        """
        length = inputs.input_ids.size(1)
        seeds = packing.seeds(seeds, length)
        projected = self._project(self.encode(packing.inputs(inputs), seeds), seeds)
        return self.pool(packing.unpacked(projected, length), inputs)

    def _project(self, states: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        """Return the outputs ``[B, N, K]`` for ``states`` ``[B, N, D]``; the states themselves."""
        return states

    def pool(self, states: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the outputs of the rows of ``[B, N, K]``; those of every token: unchanged."""
        return states


class DebertaForRows(DebertaForTask):
    """Head on the first token: classes, a score, or one logit per choice."""

    def build_heads(self, config: ModelConfig) -> None:
        """Add pooler, dropout and classifier."""
        self.pooler = ContextPooler(config)
        self.dropout = Dropout(config.head_dropout, "head")
        self.classifier = nn.Linear(config.hidden_size, num_outputs(config))

    def logits(
        self,
        inputs: ModelInputs,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Compute ``[B, K]``; arguments as in the base class.

        The last layer runs at the first token only, which is exact.
        """
        self._check_inputs(inputs)
        first = torch.zeros_like(inputs.input_ids[:, :1])
        state = self.encode_selected(inputs, first, seeds, perturbation)
        return self._classify(state, first, seeds)[:, 0]

    def packed_logits(
        self, inputs: ModelInputs, packing: RowPacking, seeds: DropoutSeeds | None = None
    ) -> Tensor:
        """Compute ``[B, K]``; arguments as in the base class."""
        seeds = packing.seeds(seeds, inputs.input_ids.size(1))
        states = self.encode_selected(packing.inputs(inputs), packing.firsts, seeds)
        return self._classify(states, packing.firsts, seeds).flatten(0, 1)[packing.places]

    def _classify(self, states: Tensor, positions: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        """Return the outputs for ``states`` ``[B, M, D]`` at ``positions`` ``[B, M]``."""
        out: Tensor = self.classifier(self.dropout(self.pooler(states), positions, seeds))
        return out


class DebertaForTokens(DebertaForTask):
    """Head on every token: classes."""

    def build_heads(self, config: ModelConfig) -> None:
        """Add dropout and classifier."""
        self.dropout = Dropout(config.head_dropout, "head")
        self.classifier = nn.Linear(config.hidden_size, num_outputs(config))

    def _project(self, states: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        positions = torch.arange(states.size(1), device=states.device).expand(states.shape[:2])
        out: Tensor = self.classifier(self.dropout(states, positions, seeds))
        return out


class DebertaForSpans(DebertaForTask):
    """Head on every token: logits of being the first and the last token of the answer."""

    def build_heads(self, config: ModelConfig) -> None:
        """Add the projection to two logits per token."""
        self.qa_outputs = nn.Linear(config.hidden_size, num_outputs(config))

    def _project(self, states: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        out: Tensor = self.qa_outputs(states)
        return out


class DebertaForEmbedding(DebertaForTask):
    """Mean of the last layer's states over the tokens of a row; no parameters of its own."""

    def pool(self, states: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the embeddings ``[B, D]``, fp32, of states ``[B, N, D]``."""
        mean = mean_state(states, inputs.is_token)
        return F.normalize(mean, dim=-1) if self.config.normalize_embeddings else mean


def task_model(config: ModelConfig) -> type[DebertaForTask]:
    """Return the class of the model that ``config.head`` names."""
    classes: dict[str, type[DebertaForTask]] = {
        "spans": DebertaForSpans,
        "tokens": DebertaForTokens,
        "embed": DebertaForEmbedding,
    }
    return classes.get(config.head, DebertaForRows)


def model_class(config: ModelConfig) -> type[DebertaBackbone] | type[DebertaForReplacedTokens]:
    """Return the class of a model with the head that ``config.head`` names."""
    pretraining: dict[str, type[DebertaBackbone] | type[DebertaForReplacedTokens]] = {
        "mlm": DebertaForPretraining,
        "autoregressive": DebertaForPretraining,
        "rtd": DebertaForReplacedTokens,
        "discriminator": DebertaDiscriminator,
    }
    return pretraining.get(config.head) or task_model(config)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> logical shape of every parameter, in the model's order."""
    with torch.device("meta"):
        model = model_class(config)(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of the model, tied embeddings once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())
