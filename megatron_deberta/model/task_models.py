"""Models of labelled tasks: the encoder with the heads that transformers' classes have.

Shapes: B rows, N tokens, K outputs of the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.deberta import DebertaBackbone, DebertaForPretraining
from megatron_deberta.model.dropout import Dropout, DropoutSeeds
from megatron_deberta.model.embeddings import Perturbation
from megatron_deberta.model.heads import ContextPooler, num_outputs
from megatron_deberta.model.input_checks import check_inputs
from megatron_deberta.model.replaced_tokens import DebertaDiscriminator, DebertaForReplacedTokens
from megatron_deberta.ops import RelativePositions


class DebertaForTask(DebertaBackbone):
    """Base class: an encoder with a head whose outputs are ``logits``."""

    def _table_slots(self, length: int) -> range | None:
        """Return the slots that rows of this length use.

        Rows are often so short that projecting the whole table in every layer would cost more than
        projecting the tokens.
        """
        config = self.config
        positions = RelativePositions(config.max_relative_positions, config.position_buckets)
        return positions.slots_of_length(length)

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Compute the head's outputs.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: bool (or 0 and 1) ``[B, N]``, True = token; None: no padding.
            token_type_ids: int64 ``[B, N]``; ignored by models without token types.
            seeds: dropout keys; None: no dropout.
            perturbation: of the normalised embeddings (SiFT).

        Returns:
            ``[B, K]`` for a head on rows, ``[B, N, K]`` for a head on tokens.

        Raises:
            ModelInputError: a tensor has a wrong shape, or values out of range.
        """
        raise NotImplementedError

    def _check_inputs(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> None:
        check_inputs(
            self.config,
            input_ids,
            attention_mask,
            token_type_ids,
            has_positions=self.config.absolute_positions == "input",
        )

    def packed_logits(
        self,
        input_ids: Tensor,
        packing: RowPacking,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """Compute the outputs of ``logits``, with hardly any computation for padding.

        Exact without dropout, which has the key of the first of the rows side by side.

        Args:
            input_ids: int64 ``[B, N]``.
            packing: which of these tokens stand side by side.
            token_type_ids: int64 ``[B, N]``.
            seeds: dropout keys of the B rows; None: no dropout.

        Returns:
            As ``logits``; of a head on tokens, outputs of padding have no meaning.
        """
        raise NotImplementedError


class _PackedInputs(NamedTuple):
    """Arguments of `DebertaBackbone.encode` for rows side by side."""

    input_ids: Tensor
    attention_mask: Tensor
    seeds: DropoutSeeds | None
    token_type_ids: Tensor | None
    position_ids: Tensor
    document_ids: Tensor


class RowPacking(NamedTuple):
    """Which rows of a batch ``[B, N]`` stand side by side, in fewer rows ``[P, L]``.

    Attributes:
        tokens: int64 ``[P, L]``: token ``N * row + place`` of the batch, -1 = padding at the end.
            The rows of a packed row are in ascending order.
        firsts: int64 ``[P, S]``: place of the first token of each of its rows, -1 = padding.
        places: int64 ``[B]``: where each row is in ``firsts``, flattened.
    """

    tokens: Tensor
    firsts: Tensor
    places: Tensor

    def inputs(
        self, input_ids: Tensor, token_type_ids: Tensor | None, seeds: DropoutSeeds | None
    ) -> _PackedInputs:
        """Return the inputs of the encoder; arguments as in `DebertaForTask.packed_logits`."""
        real, index = self.tokens >= 0, self.tokens.clamp(min=0)
        row = index // input_ids.size(1)
        return _PackedInputs(
            input_ids.take(index),
            real,
            None if seeds is None else replace(seeds, samples=seeds.samples[row[:, 0]]),
            None if token_type_ids is None else token_type_ids.take(index),
            index % input_ids.size(1),
            # Padding at the end belongs to a document of its own.
            row.masked_fill(~real, len(input_ids)),
        )

    def unpacked(self, x: Tensor, length: int) -> Tensor:
        """Return the values ``[B, N, K]`` of ``[P, L, K]``; those of padding have no meaning.

        Args:
            x: a value of each token side by side.
            length: N.
        """
        packed_row = self.places // self.firsts.size(1)
        begins = packed_row * x.size(1) + self.firsts.flatten()[self.places]
        index = begins.unsqueeze(1) + torch.arange(length, device=x.device)
        # Deterministic on CUDA, as in `gather_tokens`
        return functional.embedding(index.clamp(max=x[..., 0].numel() - 1), x.flatten(0, 1))


class DebertaForRows(DebertaForTask):
    """Head on the first token: classes, a score, or one logit per choice."""

    def _build_heads(self, config: ModelConfig) -> None:
        self.pooler = ContextPooler(config)
        self.dropout = Dropout(config.head_dropout, "head")
        self.classifier = nn.Linear(config.hidden_size, num_outputs(config))

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Compute ``[B, K]``; arguments as in the base class.

        The last layer runs at the first token only, which is exact.
        """
        self._check_inputs(input_ids, attention_mask, token_type_ids)
        first = torch.zeros_like(input_ids[:, :1])
        state = self.encode_selected(
            input_ids, first, attention_mask, seeds, token_type_ids, perturbation
        )
        return self._classify(state, first, seeds)[:, 0]

    def packed_logits(
        self,
        input_ids: Tensor,
        packing: RowPacking,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """Compute ``[B, K]``; arguments as in the base class."""
        packed = packing.inputs(input_ids, token_type_ids, seeds)
        states = self.encode_selected(selected=packing.firsts, **packed._asdict())
        out = self._classify(states, packing.firsts, packed.seeds)
        return out.flatten(0, 1)[packing.places]

    def _classify(self, states: Tensor, positions: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        """Return the outputs for ``states`` ``[B, M, D]`` at ``positions`` ``[B, M]``."""
        out: Tensor = self.classifier(self.dropout(self.pooler(states), positions, seeds))
        return out


class DebertaForTokens(DebertaForTask):
    """Head on every token: classes."""

    def _build_heads(self, config: ModelConfig) -> None:
        self.dropout = Dropout(config.head_dropout, "head")
        self.classifier = nn.Linear(config.hidden_size, num_outputs(config))

    def _project(self, states: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        """Return the outputs for ``states`` ``[B, N, H]``."""
        positions = torch.arange(states.size(1), device=states.device).expand(states.shape[:2])
        out: Tensor = self.classifier(self.dropout(states, positions, seeds))
        return out

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Compute ``[B, N, K]``; arguments as in the base class."""
        self._check_inputs(input_ids, attention_mask, token_type_ids)
        states = self.encode(
            input_ids,
            attention_mask,
            seeds=seeds,
            token_type_ids=token_type_ids,
            perturbation=perturbation,
        )
        return self._project(states, seeds)

    def packed_logits(
        self,
        input_ids: Tensor,
        packing: RowPacking,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """Compute ``[B, N, K]``; arguments as in the base class."""
        packed = packing.inputs(input_ids, token_type_ids, seeds)
        out = self._project(self.encode(**packed._asdict()), packed.seeds)
        return packing.unpacked(out, input_ids.size(1))


class DebertaForSpans(DebertaForTokens):
    """Head on every token: logits of being the first and the last token of the answer."""

    def _build_heads(self, config: ModelConfig) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, num_outputs(config))

    def _project(self, states: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        out: Tensor = self.qa_outputs(states)
        return out


def task_model(config: ModelConfig) -> type[DebertaForTask]:
    """Return the class of the model that ``config.head`` names."""
    classes: dict[str, type[DebertaForTask]] = {
        "spans": DebertaForSpans,
        "tokens": DebertaForTokens,
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
