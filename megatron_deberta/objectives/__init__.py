"""Training objectives: models with their loss."""

from __future__ import annotations

from megatron_deberta.config.schema import RunConfig
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
from megatron_deberta.objectives.rtd import ReplacedTokenDetection

OBJECTIVES: dict[str, type[Objective]] = {
    "mlm": MaskedLanguageModelling,
    "mlm+ar": MaskedAndAutoregressiveModelling,
    "autoregressive": AutoregressiveModelling,
    "rtd": ReplacedTokenDetection,
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "spans": Spans,
    "tokens": Tokens,
    "choices": Choices,
}
"""Objectives by ``objective.name``; a program may replace one by its own before it trains."""


def build_objective(config: RunConfig) -> Objective:
    """Return the objective that ``objective.name`` names."""
    return OBJECTIVES[config.objective.name](config)


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
