"""Language modelling: of masked tokens, with BERT's next sentences for pairs, or of next tokens.

Source of the latter, alone or in turn with masked batches (DeBERTa-MT): He et al. 2021,
arXiv:2006.03654, appendix A.4: the upper triangle of self-attention is masked. The state at
position i, whose query and keys are tokens 0 to i, predicts token i + 1.
"""

from __future__ import annotations

import functools
import math
import shlex
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.model import DebertaForPretraining, DropoutSeeds
from megatron_deberta.model.flops import pretraining_flops_per_token
from megatron_deberta.model.heads import TokenLoss
from megatron_deberta.objectives.objective import (
    NO_COUNTS,
    Counts,
    LossSums,
    LossTerm,
    Mean,
    Means,
    ModelLosses,
    Objective,
    export_command,
)
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL, CrossEntropy

MASKED, NEXT_SENTENCE, AUTOREGRESSIVE = "masked", "next_sentence", "autoregressive"
"""Names of the losses of pretraining models."""


class MaskedLanguageModel(DebertaForPretraining):
    """The pretraining model with its losses; constructed like `DebertaBackbone`."""

    def build_heads(self, config: ModelConfig) -> None:
        """Add the loss."""
        super().build_heads(config)
        self.token_loss = TokenLoss(config.vocab_size)

    def forward(
        self,
        batch: Batch,
        seeds: DropoutSeeds | None = None,
        *,
        reduction: Literal["sum", "none"] = "sum",
    ) -> ModelLosses:
        """Compute the losses of a micro batch.

        Args:
            batch: on the model's device.
            seeds: dropout keys; None: no dropout.
            reduction: ``none`` returns the losses of the tokens, ``[B * M]``, without gradients.

        Returns:
            The loss of the tokens to predict, in nats, under the name of the batch's form, and for
            pairs that of the next-sentence head.
        """
        decoded, pair_logits = self.decode(batch.inputs, batch.masked_positions, seeds)
        name = AUTOREGRESSIVE if batch.inputs.causal else MASKED
        losses = {name: self.predict(decoded, batch.labels, reduction)}
        is_random = batch.next_sentence_labels
        if is_random is not None and pair_logits is not None:
            loss = F.cross_entropy(pair_logits.float(), is_random, reduction="sum")
            losses[NEXT_SENTENCE] = LossSums(loss, (pair_logits.argmax(-1) == is_random).sum())
        return ModelLosses(losses)

    def predict(
        self, decoded: Tensor, labels: Tensor, reduction: Literal["sum", "none"]
    ) -> LossSums:
        """Return the loss of tokens, and the number of right ones.

        Args:
            decoded: ``[B, M, D]`` states at the positions of the tokens.
            labels: int64 ``[B, M]`` tokens, -100 = padding.
            reduction: ``none`` for the loss of each token, fp32 ``[B * M]``.
        """
        token_loss = functools.partial(self.token_loss, reduction=reduction)
        weight = self.embeddings.token.weight
        found: CrossEntropy = self.head(decoded.flatten(0, 1), weight, token_loss, labels.flatten())
        return LossSums(found.loss, found.correct)


def token_metrics(tokens: Mean, accuracy: str = "masked_accuracy") -> dict[str, float]:
    """Return loss, perplexity and accuracy per token, and the number of tokens.

    Args:
        tokens: the loss.
        accuracy: name of the accuracy.
    """
    return {
        "loss": tokens.loss,
        "perplexity": perplexity(tokens.loss),
        accuracy: tokens.accuracy,
        "num_targets": tokens.num_targets,
    }


def perplexity(loss: float) -> float:
    """Return exp(loss); inf where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


class PretrainingObjective(Objective):
    """Objective on text without labels."""

    def training_flops(self, sequence_length: float, micro_batch_size: int) -> float:
        """Count the FLOPs of forward and backward per token, without recomputation."""
        config = self.config
        return pretraining_flops_per_token(
            config.model, config.objective, int(sequence_length), micro_batch_size
        )


class MaskedLanguageModelling(PretrainingObjective):
    """Masked language modelling, plus next-sentence prediction where rows are pairs."""

    model_class = MaskedLanguageModel
    formats = {
        "perplexity": "perplexity {:.2f}",
        "masked_accuracy": "masked accuracy {:.1%}",
        "next_sentence_loss": "next-sentence loss {:.4f}",
        "next_sentence_accuracy": "accuracy {:.1%}",
        "autoregressive_perplexity": "perplexity {:.2f}",
        "autoregressive_accuracy": "accuracy {:.1%}",
        "reconstruction_accuracy": "accuracy {:.1%}",
    }

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The loss of masked tokens and, for pairs, of the next-sentence head."""
        pairs = self.config.model.next_sentence_head
        return dict.fromkeys((MASKED, NEXT_SENTENCE) if pairs else (MASKED,), LossTerm())

    def count_targets(self, batch: Batch) -> dict[str, Tensor]:
        """Return the number of masked tokens and, for text pairs, the number of labelled rows."""
        counts = {MASKED: (batch.labels != IGNORED_LABEL).sum()}
        if batch.next_sentence_labels is not None:
            counts[NEXT_SENTENCE] = (batch.next_sentence_labels != IGNORED_LABEL).sum()
        return counts

    def validation_metrics(self, means: Means, counts: Counts = NO_COUNTS) -> dict[str, float]:
        """Return loss, perplexity and accuracy per masked token, and those of pairs."""
        return token_metrics(means[MASKED]) | self.step_metrics(means)

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands that fill masks and export."""
        return [
            f'megatron-deberta fill-mask {shlex.quote(run_dir)} "Paris is the [MASK] of France."',
            export_command(run_dir),
        ]


class AutoregressiveModelling(PretrainingObjective):
    """Prediction of each next token."""

    model_class = MaskedLanguageModel
    loss_unit = "nats per predicted token"

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The loss of the next tokens."""
        return {AUTOREGRESSIVE: LossTerm()}

    def count_targets(self, batch: Batch) -> dict[str, Tensor]:
        """Return the number of predicted tokens."""
        return {AUTOREGRESSIVE: (batch.labels != IGNORED_LABEL).sum()}

    def validation_metrics(self, means: Means, counts: Counts = NO_COUNTS) -> dict[str, float]:
        """Return loss, perplexity and accuracy per piece, and the number of pieces."""
        return token_metrics(means[AUTOREGRESSIVE], "accuracy")

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands that continue texts and compute perplexities."""
        return generation_commands(run_dir)


class MaskedAndAutoregressiveModelling(MaskedLanguageModelling):
    """Each step's batch is either masked or autoregressive; validation measures both forms."""

    loss_unit = "nats per predicted token"
    validation_loss_name = "masked loss"

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The loss of masked tokens, and of next tokens."""
        return {MASKED: LossTerm(), AUTOREGRESSIVE: LossTerm()}

    def count_targets(self, batch: Batch) -> dict[str, Tensor]:
        """Return the number of masked tokens, and of next tokens."""
        count = (batch.labels != IGNORED_LABEL).sum()
        form = AUTOREGRESSIVE if batch.inputs.causal else MASKED
        return dict.fromkeys(self.losses, torch.zeros_like(count)) | {form: count}

    def step_loss(self, means: Means) -> float:
        """Return the loss of the form that the step's batch has; the other one's is 0."""
        return sum(mean.loss for mean in means.values())

    def step_metrics(self, means: Means, counts: Counts = NO_COUNTS) -> dict[str, float]:
        """Return loss and accuracy under the name of the form."""
        metrics: dict[str, float] = {}
        for name, mean in means.items():
            if mean.loss != 0:
                metrics |= {f"{name}_loss": mean.loss, f"{name}_accuracy": mean.accuracy}
        return metrics

    def validation_metrics(self, means: Means, counts: Counts = NO_COUNTS) -> dict[str, float]:
        """Return the metrics per masked token, and per next token."""
        following = means[AUTOREGRESSIVE]
        return token_metrics(means[MASKED]) | {
            "autoregressive_loss": following.loss,
            "autoregressive_perplexity": perplexity(following.loss),
            "autoregressive_accuracy": following.accuracy,
        }

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands of both forms."""
        return [*super().commands(run_dir, split), *generation_commands(run_dir)]


def generation_commands(run_dir: str) -> list[str]:
    """Return the commands that continue texts and compute perplexities."""
    folder = shlex.quote(run_dir)
    return [
        f'megatron-deberta generate {folder} "Once upon a time"',
        f"megatron-deberta evaluate perplexity --model {folder} --data TEXT.txt",
    ]
