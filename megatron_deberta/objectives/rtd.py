"""Replaced-token detection: a generator fills masks, a discriminator finds what it replaced.

Source: He et al. 2021, arXiv:2111.09543 (DeBERTaV3), with the released code's labels: a token is
replaced if it was masked and the drawn piece differs from the original one. The discriminator's
loss covers all tokens but padding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig, RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.errors import ConfigError
from megatron_deberta.model import DebertaForPretraining, DropoutSeeds, RuntimeOptions
from megatron_deberta.model.dropout import site_id
from megatron_deberta.model.heads import TokenLoss
from megatron_deberta.model.replaced_tokens import DebertaForReplacedTokens
from megatron_deberta.model.sampling import GumbelMax
from megatron_deberta.objectives.language_modelling import PretrainingObjective, token_metrics
from megatron_deberta.objectives.objective import (
    NO_COUNTS,
    Counts,
    LossSums,
    LossTerm,
    Means,
    ModelLosses,
    Update,
    export_command,
)
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL, CrossEntropy

GENERATOR, DISCRIMINATOR = "generator", "discriminator"
"""Names of the two losses."""

# Separate the noise of the samples, and the discriminator's dropout, from the generator's dropout.
_SAMPLES = site_id("rtd.samples")
_DISCRIMINATOR = site_id("rtd.discriminator")


class _Generator(DebertaForPretraining):
    """Masked language model that draws pieces."""

    def build_heads(self, config: ModelConfig) -> None:
        super().build_heads(config)
        self.token_loss = TokenLoss(config.vocab_size)

    def forward(self, batch: Batch, seeds: DropoutSeeds | None, draw: GumbelMax) -> CrossEntropy:
        """Return loss, number of correct predictions and samples ``[B * M]``."""
        decoded, _ = self.decode(batch.inputs, batch.masked_positions, seeds)
        weight, labels = self.embeddings.token.weight, batch.labels.flatten()
        token_loss = functools.partial(self.token_loss, draw=draw)
        out: CrossEntropy = self.head(decoded.flatten(0, 1), weight, token_loss, labels)
        return out


class ReplacedTokenModel(DebertaForReplacedTokens):
    """Generator and discriminator with their losses.

    Attributes:
        sample_seed: of the samples.
        excluded_ids: pieces that are not drawn.
        updated_separately: submodules with optimizers of their own; empty: one for all.
    """

    generator_class = _Generator
    sample_seed = 0
    excluded_ids: tuple[int, ...] = ()
    updated_separately: tuple[str, ...] = ()

    def forward(self, batch: Batch, seeds: DropoutSeeds | None = None) -> ModelLosses:
        """Compute the losses of a micro batch.

        Args:
            batch: on the model's device.
            seeds: dropout keys; None: no dropout, and the samples of step 0.

        Returns:
            Both losses; the numbers of replaced tokens, of tokens said to be replaced, and of those
            that are both; the drawn pieces, int64 ``[B, M]``, as outputs.
        """
        generated = self.generate(batch, seeds)
        samples = generated.outputs
        assert samples is not None
        detected = self.detect(batch, samples, seeds)
        return ModelLosses(generated.losses | detected.losses, detected.counts, samples)

    def generate(self, batch: Batch, seeds: DropoutSeeds | None) -> ModelLosses:
        """Return the generator's loss; the drawn pieces, int64 ``[B, M]``, are the outputs."""
        keys = DropoutSeeds(
            self.sample_seed, 0 if seeds is None else seeds.step, batch.dropout_keys
        )
        draw = draws(keys, batch.masked_positions, self.excluded_ids)
        loss, correct, samples = self.generator(batch, seeds, draw)
        losses = {GENERATOR: LossSums(loss, correct)}
        return ModelLosses(losses, outputs=samples.view(batch.labels.shape))

    def detect(self, batch: Batch, samples: Tensor, seeds: DropoutSeeds | None) -> ModelLosses:
        """Compute the discriminator's loss on a batch with the drawn pieces in place of the masks.

        Args:
            batch: the generator's micro batch, on the model's device.
            samples: the drawn pieces, int64 ``[B, M]``.
            seeds: dropout keys; None: no dropout.

        Returns:
            Its loss; the numbers of replaced tokens, of tokens said to be replaced, and of those
            that are both.
        """
        masked, positions = batch.inputs.input_ids, batch.masked_positions
        input_ids = fill(masked, positions, samples)
        is_replaced = input_ids != fill(masked, positions, batch.labels)
        if seeds is not None:
            seeds = replace(seeds, run_seed=seeds.run_seed ^ _DISCRIMINATOR)
        inputs = replace(batch.inputs, input_ids=input_ids)
        logits = self.discriminator(inputs, seeds).float()
        is_token = inputs.is_token
        losses = F.binary_cross_entropy_with_logits(logits, is_replaced.float(), reduction="none")
        loss = torch.where(is_token, losses, 0.0).sum()
        is_detected = logits > 0
        return ModelLosses(
            {DISCRIMINATOR: LossSums(loss, (is_token & (is_detected == is_replaced)).sum())},
            {
                "replaced": (is_token & is_replaced).sum(),
                "detected": (is_token & is_detected).sum(),
                "true_positives": (is_token & is_detected & is_replaced).sum(),
            },
        )


def draws(keys: DropoutSeeds, positions: Tensor, excluded: tuple[int, ...]) -> GumbelMax:
    """Return the draws of the generator's samples.

    Args:
        keys: seed, step and samples of the rows.
        positions: int64 ``[B, M]``, -1 = padding.
        excluded: pieces that are not drawn.

    Returns:
        ``B * M`` draws, row after row.
    """
    return GumbelMax.at(keys.per_row(_SAMPLES), positions, excluded)


def fill(input_ids: Tensor, positions: Tensor, pieces: Tensor) -> Tensor:
    """Return the ids with ``pieces`` at ``positions``.

    Args:
        input_ids: int64 ``[B, N]``.
        positions: int64 ``[B, M]``, -1 = padding.
        pieces: int64 ``[B, M]``.

    Returns:
        int64 ``[B, N]``, a new tensor.
    """
    # Padding goes to a column that is cut off.
    size = input_ids.size(1)
    padded = F.pad(input_ids, (0, 1))
    return padded.scatter(1, torch.where(positions < 0, size, positions), pieces)[:, :size]


class ReplacedTokenDetection(PretrainingObjective):
    """DeBERTaV3's objective; one update of both models, or one after the other."""

    counters = ("replaced", "detected", "true_positives")
    step_loss_name = validation_loss_name = "generator loss"

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The generator's loss per masked token, the discriminator's per token."""
        weight = self.config.rtd.discriminator_weight
        return {GENERATOR: LossTerm(), DISCRIMINATOR: LossTerm(weight)}

    @property
    def updates(self) -> tuple[Update, ...]:
        """One update of both models, or of the generator, then of the discriminator.

        The latter is the released code's order: the discriminator's forward pass uses the updated
        table, on samples drawn before the update.
        """
        if self.config.rtd.update == "joint":
            return super().updates
        rate = self.config.rtd.discriminator_learning_rate or None
        return (
            Update((GENERATOR,), (), lambda model, batch, seeds, _: model.generate(batch, seeds)),
            Update(
                (DISCRIMINATOR,),
                self.counters,
                lambda model, batch, seeds, samples: model.detect(batch, samples, seeds),
                rate,
            ),
        )

    def build_model(self, options: RuntimeOptions) -> ReplacedTokenModel:
        """Build both models with their losses.

        Raises:
            ConfigError: ``rtd.draw_special_tokens=false``, and their ids are not known.
        """
        rtd = self.config.rtd
        if not rtd.draw_special_tokens and not rtd.excluded_ids:
            raise ConfigError(
                "rtd.draw_special_tokens=false, but rtd.excluded_ids is empty; name the ids of the "
                "tokenizer's special tokens, as pretrain does"
            )
        model = ReplacedTokenModel(self.config.model, options)
        model.sample_seed = self.config.train.seed
        model.excluded_ids = rtd.excluded_ids
        if rtd.update == "alternating":
            model.updated_separately = ("generator", "discriminator")
        return model

    def complete_config(self, special_ids: Sequence[int]) -> RunConfig:
        """Set the pieces that are not drawn."""
        rtd = self.config.rtd
        if rtd.draw_special_tokens:
            return self.config
        return replace(self.config, rtd=replace(rtd, excluded_ids=tuple(special_ids)))

    def count_targets(self, batch: Batch) -> dict[str, Tensor]:
        """Return the number of masked tokens, and of tokens."""
        masked = (batch.labels != IGNORED_LABEL).sum()
        return {GENERATOR: masked, DISCRIMINATOR: batch.inputs.is_token.sum()}

    def step_metrics(self, means: Means, counts: Counts = NO_COUNTS) -> dict[str, float]:
        """Return the discriminator's loss and accuracy, and how well it finds replaced tokens."""
        metrics = super().step_metrics(means, counts)
        if counts:
            replaced, detected = counts["replaced"], counts["detected"]
            hits = counts["true_positives"]
            metrics["discriminator_precision"] = hits / max(detected, 1)
            metrics["discriminator_recall"] = hits / max(replaced, 1)
            metrics["discriminator_f1"] = 2 * hits / max(detected + replaced, 1)
            metrics["replaced_fraction"] = replaced / max(means[DISCRIMINATOR].num_targets, 1)
        return metrics

    def validation_metrics(self, means: Means, counts: Counts = NO_COUNTS) -> dict[str, float]:
        """Return the generator's metrics per masked token and the discriminator's per token."""
        return token_metrics(means[GENERATOR]) | self.step_metrics(means, counts)

    def describe(self, metrics: dict[str, float]) -> str:
        """Format the metrics of a validation as one line."""
        return (
            f"generator loss {metrics['loss']:.4f} | masked accuracy "
            f"{metrics['masked_accuracy']:.1%} | discriminator loss "
            f"{metrics['discriminator_loss']:.4f} | accuracy "
            f"{metrics['discriminator_accuracy']:.1%} | precision "
            f"{metrics['discriminator_precision']:.1%} | recall "
            f"{metrics['discriminator_recall']:.1%} of "
            f"{metrics['replaced_fraction']:.1%} replaced"
        )

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the command that exports both models."""
        return [export_command(run_dir)]
