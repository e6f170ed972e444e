"""Masked-language-modelling objective, with BERT's next-sentence objective for pairs."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import DebertaForPretraining, DropoutSeeds
from megatron_deberta.model.flops import pretraining_flops_per_token
from megatron_deberta.objectives.objective import NO_COUNTS, LossPart, Mean, Objective

# Label of a padding position
IGNORED_LABEL = -100
Reduction = Literal["sum", "none"]


class MaskedBatch(Protocol):
    """A micro batch of masked rows; `data.batch.Batch` is one and describes the fields."""

    @property
    def input_ids(self) -> Tensor:
        """Tokens after masking."""

    @property
    def attention_mask(self) -> Tensor:
        """True = token."""

    @property
    def padding_mask(self) -> Tensor | None:
        """The same; None: no padding."""

    @property
    def masked_positions(self) -> Tensor:
        """Positions to predict."""

    @property
    def labels(self) -> Tensor:
        """Original tokens at those positions."""

    @property
    def dropout_keys(self) -> Tensor:
        """Number of each row in the run."""

    @property
    def document_ids(self) -> Tensor | None:
        """Packed documents."""

    @property
    def position_ids(self) -> Tensor | None:
        """Positions in documents."""

    @property
    def token_type_ids(self) -> Tensor | None:
        """Segments of pairs."""

    @property
    def next_sentence_labels(self) -> Tensor | None:
        """0 = is next, 1 = is random."""

    @property
    def is_causal(self) -> bool:
        """Whether positions see no later tokens."""


class TokenLoss(nn.Module):
    """Vocabulary projection and cross-entropy.

    ``distributed.parallelize`` replaces it by a vocabulary-parallel implementation that does not
    materialise all logits.
    """

    def forward(
        self,
        states: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        reduction: Reduction = "sum",
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and the number of correct predictions.

        Args:
            states: ``[T, D]``.
            weight: ``[V, D]``.
            bias: ``[V]``.
            labels: int64 ``[T]``, -100 = not scored.
            reduction: ``none`` returns the losses of the tokens, without gradients.

        Returns:
            fp32 scalar, the sum of the losses in nats, or ``[T]``; and int64 scalar, the number
            of tokens whose most likely prediction is the label.
        """
        logits = F.linear(states, weight, bias)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction=reduction)
        return loss, (logits.argmax(-1) == labels).sum()


class MaskedLanguageModel(DebertaForPretraining):
    """The pretraining model with its loss; constructed like `DebertaBackbone`."""

    def _build_heads(self, config: ModelConfig) -> None:
        super()._build_heads(config)
        self.token_loss = TokenLoss()

    def forward(
        self,
        batch: MaskedBatch,
        seeds: DropoutSeeds | None = None,
        reduction: Reduction = "sum",
    ) -> tuple[Tensor, ...]:
        """Compute the losses of a micro batch.

        Args:
            batch: on the model's device.
            seeds: dropout keys; None: no dropout.
            reduction: ``none`` returns the losses of the tokens, without gradients.

        Returns:
            fp32 scalar, the **sum** of the losses in nats, or ``[B * M]``; and int64 scalar, the
            number of correct predictions; for pairs, the same for the next-sentence head. The
            caller divides by the number of labels of the global batch.
        """
        decoded, pair_logits = self.decode(
            batch.input_ids,
            batch.padding_mask,
            batch.masked_positions,
            batch.position_ids,
            batch.document_ids,
            seeds,
            batch.token_type_ids,
            batch.is_causal,
        )
        weight, labels = self.embeddings.token.weight, batch.labels.flatten()
        token_loss = functools.partial(self.token_loss, reduction=reduction)
        sums: tuple[Tensor, Tensor] = self.head(decoded.flatten(0, 1), weight, token_loss, labels)
        is_random = batch.next_sentence_labels
        if is_random is None or pair_logits is None:
            return sums
        pair_loss = F.cross_entropy(pair_logits.float(), is_random, reduction="sum")
        return (*sums, pair_loss, (pair_logits.argmax(-1) == is_random).sum())


def masked_metrics(tokens: Mean) -> dict[str, float]:
    """Return loss, perplexity and accuracy per masked token, and the number of tokens."""
    return {
        "loss": tokens.loss,
        "perplexity": perplexity(tokens.loss),
        "masked_accuracy": tokens.accuracy,
        "num_targets": tokens.num_targets,
    }


def perplexity(loss: float) -> float:
    """Return exp(loss); inf where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


class MaskedLanguageModelling(Objective):
    """Masked language modelling, plus next-sentence prediction where rows are pairs."""

    model_class = MaskedLanguageModel

    @property
    def parts(self) -> tuple[LossPart, ...]:
        """The loss of masked tokens and, for pairs, of the next-sentence head."""
        pairs = self.config.model.next_sentence_head
        return (LossPart(), LossPart("next_sentence")) if pairs else (LossPart(),)

    def count_targets(self, batch: MaskedBatch) -> list[Tensor]:
        """Return the number of masked tokens and, for text pairs, the number of labelled rows."""
        counts = [(batch.labels != IGNORED_LABEL).sum()]
        if batch.next_sentence_labels is not None:
            counts.append((batch.next_sentence_labels != IGNORED_LABEL).sum())
        return counts

    def validation_metrics(
        self, means: Sequence[Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return loss, perplexity and accuracy per masked token, and those of pairs."""
        return masked_metrics(means[0]) | self.step_metrics(means)

    def describe(self, metrics: dict[str, float]) -> str:
        """Format the metrics of a validation as one line."""
        text = (
            f"loss {metrics['loss']:.4f} | perplexity {metrics['perplexity']:.2f} | "
            f"masked accuracy {metrics['masked_accuracy']:.1%}"
        )
        if "next_sentence_loss" in metrics:
            text += (
                f" | next-sentence loss {metrics['next_sentence_loss']:.4f} | "
                f"accuracy {metrics['next_sentence_accuracy']:.1%}"
            )
        return text

    def training_flops(self, sequence_length: float, micro_batch_size: int) -> float:
        """Count the FLOPs of forward and backward per token, without recomputation."""
        config = self.config
        return pretraining_flops_per_token(
            config.model, config.objective, int(sequence_length), micro_batch_size
        )

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands that fill masks and export."""
        folder, export = shlex.quote(run_dir), shlex.quote(str(Path(run_dir) / "hf"))
        return [
            f'megatron-deberta fill-mask {folder} "Paris is the [MASK] of France."',
            f"megatron-deberta convert --checkpoint {folder} --to hf --output {export}",
        ]
