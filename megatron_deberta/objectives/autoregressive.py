"""Autoregressive language modelling, alone or with masked language modelling (DeBERTa-MT).

Source: He et al. 2021, arXiv:2006.03654, appendix A.4: the upper triangle of self-attention is
masked. The state at position i, whose query and keys are tokens 0 to i, predicts token i + 1.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from torch import Tensor

from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.model.flops import pretraining_flops_per_token
from megatron_deberta.objectives.mlm import (
    AUTOREGRESSIVE,
    MASKED,
    MaskedLanguageModel,
    MaskedLanguageModelling,
    masked_metrics,
    perplexity,
)
from megatron_deberta.objectives.objective import NO_COUNTS, LossTerm, Mean, Objective


class AutoregressiveModelling(Objective):
    """Prediction of each next token."""

    loss_unit = "nats per predicted token"
    model_class = MaskedLanguageModel

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The loss of the next tokens."""
        return {AUTOREGRESSIVE: LossTerm()}

    def count_targets(self, batch: Batch) -> dict[str, Tensor]:
        """Return the number of predicted tokens."""
        return {AUTOREGRESSIVE: (batch.labels != IGNORED_LABEL).sum()}

    def validation_metrics(
        self, means: Mapping[str, Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return loss, perplexity and accuracy per piece, and the number of pieces."""
        tokens = means[AUTOREGRESSIVE]
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
        nothing = count.new_zeros(())
        if batch.inputs.causal:
            return {MASKED: nothing, AUTOREGRESSIVE: count}
        return {MASKED: count, AUTOREGRESSIVE: nothing}

    def step_loss(self, means: Mapping[str, Mean]) -> float:
        """Return the loss of the form that the step's batch has; the other one's is 0."""
        return sum(mean.loss for mean in means.values())

    def step_metrics(
        self, means: Mapping[str, Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return loss and accuracy under the name of the form."""
        metrics: dict[str, float] = {}
        for name, mean in means.items():
            if mean.loss != 0:
                metrics |= {f"{name}_loss": mean.loss, f"{name}_accuracy": mean.accuracy}
        return metrics

    def validation_metrics(
        self, means: Mapping[str, Mean], counts: Mapping[str, int] = NO_COUNTS
    ) -> dict[str, float]:
        """Return the metrics per masked token, and per next token."""
        following = means[AUTOREGRESSIVE]
        return masked_metrics(means[MASKED]) | {
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
