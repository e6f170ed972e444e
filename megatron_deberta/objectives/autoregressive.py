"""Autoregressive language modelling, alone or with masked language modelling (DeBERTa-MT).

Source: He et al. 2021, arXiv:2006.03654, appendix A.4: the upper triangle of self-attention is
masked. The state at position i, whose query and keys are tokens 0 to i, predicts token i + 1.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron_deberta.model import DropoutSeeds
from megatron_deberta.model.flops import pretraining_flops_per_token
from megatron_deberta.objectives.mlm import (
    IGNORED_LABEL,
    MaskedBatch,
    MaskedLanguageModel,
    MaskedLanguageModelling,
    Reduction,
    masked_metrics,
    perplexity,
)
from megatron_deberta.objectives.objective import NO_COUNTS, LossPart, Mean, Objective


class AutoregressiveModelling(Objective):
    """Prediction of each next token."""

    loss_unit = "nats per predicted token"
    model_class = MaskedLanguageModel

    def count_targets(self, batch: MaskedBatch) -> list[Tensor]:
        """Return the number of predicted tokens."""
        return [(batch.labels != IGNORED_LABEL).sum()]

    def validation_metrics(
        self, means: Sequence[Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return loss, perplexity and accuracy per piece, and the number of pieces."""
        tokens = means[0]
        return {
            "loss": tokens.loss,
            "perplexity": perplexity(tokens.loss),
            "accuracy": tokens.accuracy,
            "num_targets": tokens.num_targets,
        }

    def training_flops(self, sequence_length: float, micro_batch_size: int) -> float:
        """Count the FLOPs of forward and backward per token, without recomputation."""
        config = self.config
        return pretraining_flops_per_token(
            config.model, config.objective, int(sequence_length), micro_batch_size
        )

    def commands(self, run_dir: str, split: str = "test") -> list[str]:
        """Return the commands that continue texts and compute perplexities."""
        return generation_commands(run_dir)


class TwoFormModel(MaskedLanguageModel):
    """The pretraining model with the losses of masked and of autoregressive batches."""

    def forward(
        self,
        batch: MaskedBatch,
        seeds: DropoutSeeds | None = None,
        reduction: Reduction = "sum",
    ) -> tuple[Tensor, ...]:
        """Compute the loss of the batch's form; arguments as in `MaskedLanguageModel.forward`.

        Returns:
            Sum of the losses and number of correct predictions in the masked form, then in the
            autoregressive one; those of the form that the batch has not are zero. With
            ``reduction="none"``, the losses of the tokens, and the number of correct predictions.
        """
        loss, correct = super().forward(batch, seeds, reduction)
        if reduction == "none":
            return loss, correct
        nothing = loss.new_zeros(()), correct.new_zeros(())
        return (*nothing, loss, correct) if batch.is_causal else (loss, correct, *nothing)


class MaskedAndAutoregressiveModelling(MaskedLanguageModelling):
    """Each step's batch is either masked or autoregressive; validation measures both forms."""

    loss_unit = "nats per predicted token"
    validation_loss_name = "masked loss"
    model_class = TwoFormModel

    @property
    def parts(self) -> tuple[LossPart, ...]:
        """The loss of masked tokens, and of next tokens."""
        return (LossPart(), LossPart("autoregressive"))

    def count_targets(self, batch: MaskedBatch) -> list[Tensor]:
        """Return the number of masked tokens, and of next tokens."""
        count = (batch.labels != IGNORED_LABEL).sum()
        nothing = count.new_zeros(())
        return [nothing, count] if batch.is_causal else [count, nothing]

    def step_loss(self, means: Sequence[Mean]) -> float:
        """Return the loss of the form that the step's batch has; the other one's is 0."""
        return sum(mean.loss for mean in means)

    def step_metrics(
        self, means: Sequence[Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return loss and accuracy under the name of the form."""
        metrics: dict[str, float] = {}
        for name, mean in zip(("masked", "autoregressive"), means, strict=True):
            if mean.loss != 0:
                metrics |= {f"{name}_loss": mean.loss, f"{name}_accuracy": mean.accuracy}
        return metrics

    def validation_metrics(
        self, means: Sequence[Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return the metrics per masked token, and per next token."""
        following = means[1]
        return masked_metrics(means[0]) | {
            "autoregressive_loss": following.loss,
            "autoregressive_perplexity": perplexity(following.loss),
            "autoregressive_accuracy": following.accuracy,
        }

    def describe(self, metrics: dict[str, float]) -> str:
        """Format the metrics of a validation as one line."""
        return (
            f"{super().describe(metrics)} | autoregressive loss "
            f"{metrics['autoregressive_loss']:.4f} | perplexity "
            f"{metrics['autoregressive_perplexity']:.2f} | accuracy "
            f"{metrics['autoregressive_accuracy']:.1%}"
        )

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
