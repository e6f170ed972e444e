r"""Pretrain a run file with one more loss: a penalty on large states of the masked tokens.

Usage: PYTHONPATH=examples megatron-deberta pretrain RUN.yaml \
         objective.class_path=pretrain_with_loss.PenalisedModelling [KEY=VALUE ...]

The loss has a name, from the model to metrics.jsonl ("penalty_loss"), and works with every
engine, layout and precision as the others do.
"""

import torch
from torch import Tensor

from megatron_deberta.data.batch import Batch
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.objectives import (
    LossSums,
    LossTerm,
    MaskedLanguageModel,
    MaskedLanguageModelling,
    ModelLosses,
)


class PenalisedModel(MaskedLanguageModel):
    """Masked language model that also returns the penalty as a loss."""

    def decode(self, *args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        """Keep the states ``[B, M, D]`` of the masked tokens."""
        decoded, pair_logits = super().decode(*args, **options)
        self.decoded = decoded
        return decoded, pair_logits

    def forward(
        self, batch: Batch, seeds: DropoutSeeds | None = None, **options: str
    ) -> ModelLosses:
        """Add the mean square of each masked token's state, summed over these tokens."""
        found = super().forward(batch, seeds, **options)
        squares = self.decoded.float().square().mean(-1)
        penalty = torch.where(batch.masked_positions >= 0, squares, 0.0).sum()
        found.losses["penalty"] = LossSums(penalty, batch.labels.new_zeros(()))
        return found


class PenalisedModelling(MaskedLanguageModelling):
    """Masked language modelling with the penalty."""

    model_class = PenalisedModel

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The weight of the penalty is 1; it counts no correct predictions."""
        return super().losses | {"penalty": LossTerm(1.0, has_accuracy=False)}

    def count_targets(self, batch: Batch) -> dict[str, Tensor]:
        """The penalty is a mean over the masked tokens, too."""
        counts = super().count_targets(batch)
        return counts | {"penalty": counts["masked"]}
