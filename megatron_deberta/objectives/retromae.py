"""Reconstruction of rows from a sentence embedding, beside masked language modelling (RetroMAE).

Source: Xiao et al. 2022, arXiv:2205.12035, sections 3.1 and 3.2 (basic decoding); docs/retromae.md
lists where this differs.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.model import DropoutSeeds, RuntimeOptions
from megatron_deberta.model.attention import AttentionContext
from megatron_deberta.model.dropout import site_id
from megatron_deberta.model.flops import BACKWARD_FACTOR, forward_flops, training_flops_per_token
from megatron_deberta.model.heads import mean_state
from megatron_deberta.model.inputs import TokenInfo, gather_tokens
from megatron_deberta.model.layers import Layer
from megatron_deberta.objectives.language_modelling import (
    MASKED,
    MaskedLanguageModel,
    MaskedLanguageModelling,
)
from megatron_deberta.objectives.objective import LossTerm, ModelLosses
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL

RECONSTRUCTION = "reconstruction"
"""Name of the decoder's loss; the encoder's is ``masked``."""

# Separates the decoder's dropout from the encoder's.
_DECODER = site_id("retromae.decoder")


class RetroMAEModel(MaskedLanguageModel):
    """Masked language model with a decoder of one layer, which uses the same embeddings and head.

    Attributes:
        pooling: how states become the embedding, as in ``objective.retromae_pooling``.
    """

    pooling: Literal["mean", "cls"] = "mean"

    def build_heads(self, config: ModelConfig) -> None:
        """Add the decoder."""
        super().build_heads(config)
        self.row_decoder = Layer(config, config.num_layers)

    def forward(
        self,
        batch: Batch,
        seeds: DropoutSeeds | None = None,
        *,
        reduction: Literal["sum", "none"] = "sum",
    ) -> ModelLosses:
        """Compute the losses of encoder and decoder; arguments as in the base class.

        Evaluations of language models have no rows for the decoder, whose loss is then left out.
        """
        inputs, decoder = batch.inputs, batch.decoder
        if decoder is None:
            return super().forward(batch, seeds, reduction=reduction)
        places = TokenInfo.of_sequence(inputs).positions
        if self.pooling == "cls":
            places = places[:, :1]
        decoded, states, context = self.decode_and_encode(
            inputs, batch.masked_positions, seeds, places
        )
        states = cast(Tensor, states)
        pooled = mean_state(states, inputs.is_token) if self.pooling == "mean" else states[:, 0]
        reconstructed = self.reconstruct(pooled, batch, context, seeds)
        return ModelLosses(
            {
                MASKED: self.predict(decoded, batch.labels, reduction),
                RECONSTRUCTION: self.predict(reconstructed, decoder.labels, reduction),
            }
        )

    def reconstruct(
        self,
        embedding: Tensor,
        batch: Batch,
        context: AttentionContext,
        seeds: DropoutSeeds | None,
    ) -> Tensor:
        """Run the decoder on the row as masked for it, with the embedding in place of [CLS].

        Computing only the tokens to predict is exact, since the decoder has one layer.

        Args:
            embedding: ``[B, D]``, replicated on all ranks.
            batch: with rows for the decoder.
            context: of the encoder; the position table and the padding are the same.
            seeds: dropout keys of the encoder.

        Returns:
            ``[B, M, D]`` states at the decoder's masked positions.
        """
        assert batch.decoder is not None
        input_ids, positions, _ = batch.decoder
        if seeds is not None:
            seeds = replace(seeds, run_seed=seeds.run_seed ^ _DECODER)
        tokens = TokenInfo.of_sequence(replace(batch.inputs, input_ids=input_ids))
        embedded, _ = self.embeddings(input_ids, tokens, seeds)
        rows: Tensor = self.exit(embedded)
        rows = torch.cat([embedding.to(rows.dtype).unsqueeze(1), rows[:, 1:]], dim=1)
        context = replace(context, seeds=seeds, distinct_queries=self.training)
        tokens = tokens.replicated()
        key_value = self.row_decoder.attention.project_key_value(rows, tokens, context)
        queries = gather_tokens(rows, positions)
        out: Tensor = self.row_decoder(queries, tokens.select(positions), context, key_value)
        return out


class RetroMAE(MaskedLanguageModelling):
    """Masked language modelling, and reconstruction of rows from their embeddings."""

    model_class = RetroMAEModel
    step_loss_name = validation_loss_name = "encoder loss"

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The losses of the tokens that are masked for the encoder, and for the decoder."""
        return {MASKED: LossTerm(), RECONSTRUCTION: LossTerm()}

    def build_model(self, options: RuntimeOptions) -> RetroMAEModel:
        """Build the model with its losses."""
        model = RetroMAEModel(self.config.model, options)
        model.pooling = self.config.objective.retromae_pooling
        return model

    def count_targets(self, batch: Batch) -> dict[str, Tensor]:
        """Return the number of tokens that encoder and decoder predict."""
        assert batch.decoder is not None
        targets = (batch.decoder.labels != IGNORED_LABEL).sum()
        return super().count_targets(batch) | {RECONSTRUCTION: targets}

    def training_flops(self, sequence_length: float, micro_batch_size: int) -> float:
        """Count the FLOPs of the encoder, of its output that is pooled, and of the decoder."""
        length, objective = int(sequence_length), self.config.objective
        encoder = super().training_flops(sequence_length, micro_batch_size)
        # The decoder computes what a mask decoder of one pass does, in a model of one layer.
        layer = replace(
            self.config.model, num_layers=1, mask_decoder_passes=1, conv_kernel_size=None
        )
        share = objective.retromae_mask_probability
        decoder = training_flops_per_token(layer, length, micro_batch_size, share)
        if not self.config.model.mask_decoder_passes:
            return encoder + decoder
        read = 1.0 if objective.retromae_pooling == "mean" else 1 / length
        some, none = (
            forward_flops(layer, length, micro_batch_size, part).mask_decoder for part in (read, 0)
        )
        return encoder + decoder + BACKWARD_FACTOR * (some - none)

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands that train embeddings, fill masks and export."""
        folder = shlex.quote(run_dir)
        return [
            f"megatron-deberta finetune stsb_embed --model {folder} --data DIR",
            *super().commands(run_dir, split),
        ]
