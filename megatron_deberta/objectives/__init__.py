"""Training objectives: models with their loss.

A user's own is a subclass of `Objective`, named by ``objective.class_path`` or set in `OBJECTIVES`
before the run (``examples/pretrain_with_loss.py``). One of the package has further places: its name
and head in ``config.schema`` (``ObjectiveName``, ``head_of``), its batches in ``data.build``, and
the split of new weights over ranks in ``distributed.parallelize.plan``.
"""

from __future__ import annotations

import pkgutil

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.objectives.embed import Embedding
from megatron_deberta.objectives.labelled import Choices, Classification, Regression, Spans, Tokens
from megatron_deberta.objectives.language_modelling import (
    AutoregressiveModelling,
    MaskedAndAutoregressiveModelling,
    MaskedLanguageModel,
    MaskedLanguageModelling,
)
from megatron_deberta.objectives.multilabel import Multilabel
from megatron_deberta.objectives.objective import (
    NO_COUNTS,
    LossSums,
    LossTerm,
    Mean,
    ModelLosses,
    Objective,
    Update,
)
from megatron_deberta.objectives.rerank import Reranking
from megatron_deberta.objectives.retromae import RetroMAE
from megatron_deberta.objectives.rtd import ReplacedTokenDetection

OBJECTIVES: dict[str, type[Objective]] = {
    "mlm": MaskedLanguageModelling,
    "mlm+ar": MaskedAndAutoregressiveModelling,
    "autoregressive": AutoregressiveModelling,
    "retromae": RetroMAE,
    "rtd": ReplacedTokenDetection,
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "spans": Spans,
    "tokens": Tokens,
    "choices": Choices,
    "embed": Embedding,
    "rerank": Reranking,
}
"""Objectives by ``objective.name``; a program may replace one by its own before it trains."""


def build_objective(config: RunConfig) -> Objective:
    """Return the objective of a run: that of ``objective.class_path``, or else of its name.

    Raises:
        ConfigError: ``objective.class_path`` cannot be imported or is no `Objective`.
    """
    path = config.objective.class_path
    if not path:
        return OBJECTIVES[config.objective.name](config)
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"objective.class_path={path}: {error}; give module.Class, and put the folder of the "
            "module in PYTHONPATH on every node"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ConfigError(
            f"objective.class_path={path} is no subclass of megatron_deberta.objectives.Objective"
        )
    return found(config)


__all__ = [
    "NO_COUNTS",
    "OBJECTIVES",
    "LossSums",
    "LossTerm",
    "MaskedLanguageModel",
    "MaskedLanguageModelling",
    "Mean",
    "ModelLosses",
    "Objective",
    "Update",
    "build_objective",
]
