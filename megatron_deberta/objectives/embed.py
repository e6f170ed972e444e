"""Embeddings of texts: in-batch negatives, or the squared error of cosines.

Sources: Henderson et al. 2017, arXiv:1705.00652, section 4.4, as sentence-transformers'
``MultipleNegativesRankingLoss`` (its ``scale`` is 1 / ``objective.temperature``); Reimers and
Gurevych 2019, arXiv:1908.10084, section 3, as its ``CosineSimilarityLoss``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.model import DebertaForTask, RuntimeOptions
from megatron_deberta.model.parallel_layers import GatherFromDataParallelRegion
from megatron_deberta.model.task_models import DebertaForEmbedding
from megatron_deberta.objectives.labelled import (
    MASKED_LOGIT,
    TASK,
    LabelledObjective,
    TaskModel,
    cross_entropy,
)
from megatron_deberta.objectives.objective import LossTerm
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL


class EmbeddingModel(TaskModel, DebertaForEmbedding):
    """Model of embeddings, with loss."""

    def build_heads(self, config: ModelConfig) -> None:
        """Add the exchange of embeddings."""
        super().build_heads(config)
        self.exchange = GatherFromDataParallelRegion()


class Embedding(LabelledObjective):
    """Cosines of the texts of an example, which are rows of a batch.

    With ``objective.positive_similarity``, cross-entropy over the second texts of the global batch,
    then its negatives; the right one is the pair's own. Otherwise the squared error of the cosine
    to the similarity.
    """

    model_class = EmbeddingModel
    _exchange: Callable[[Tensor], tuple[Tensor, int]] = GatherFromDataParallelRegion()

    @property
    def losses(self) -> dict[str, LossTerm]:
        """The task's loss."""
        has_accuracy = self.config.objective.positive_similarity is not None
        return {TASK: LossTerm(has_accuracy=has_accuracy)}

    def build_model(self, options: RuntimeOptions) -> DebertaForTask:
        """Build the model with this objective's loss."""
        model = super().build_model(options)
        assert isinstance(model, EmbeddingModel)
        # Not the layer itself, which is replaced when the model is divided over ranks.
        self._exchange = lambda rows: model.exchange(rows)
        return model

    def loss(self, logits: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
        """Return the sum over pairs, and how many are nearer than all negatives.

        Args:
            logits: embeddings ``[B, D]``.
            batch: on the device of the embeddings; the loss needs at least two texts per example.
        """
        scored, rows = self.scored(batch), batch.choice_rows
        assert rows is not None
        texts = F.normalize(logits.float(), dim=-1)[rows]
        objective = self.config.objective
        if texts.size(1) < 2:
            return texts.sum() * 0.0, scored.sum() * 0
        if objective.positive_similarity is None:
            errors = (texts[:, 0] * texts[:, 1]).sum(-1) - batch.labels
            return torch.where(scored, errors, 0.0).square().sum(), scored.sum() * 0
        is_there = (batch.row_index >= 0)[rows[:, 1:]].unsqueeze(-1)
        gathered, first = self._exchange(torch.cat([texts[:, 1:], is_there.float()], -1))
        candidates, is_there = gathered.transpose(0, 1).flatten(0, 1).split([texts.size(-1), 1], -1)
        scores = texts[:, 0] @ candidates.T / objective.temperature
        scores = scores.masked_fill(is_there[:, 0] == 0, MASKED_LOGIT)
        own = first + torch.arange(len(texts), device=texts.device)
        return cross_entropy(scores, torch.where(scored, own, IGNORED_LABEL))

    def scored(self, batch: TaskBatch) -> Tensor:
        """Return which examples are positives, or have a similarity."""
        least = self.config.objective.positive_similarity
        return ~torch.isnan(batch.labels) if least is None else batch.labels >= least
