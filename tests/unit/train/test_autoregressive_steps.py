"""Training steps and validation of autoregressive objectives in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_deberta.config import validate
from megatron_deberta.config.schema import (
    DataConfig,
    GuardConfig,
    ObjectiveConfig,
    ParallelConfig,
    RunConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import ShardedModel, build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.base import Engine
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.validation import evaluate
from megatron_deberta.objectives import build_objective
from megatron_deberta.train.step import TrainStep
from tests.support.objective_layouts import as_causal
from tests.unit.train.test_step import CONFIG, part, rows

GROUPS = single_process_groups(torch.device("cpu"))
BOTH = replace(
    CONFIG, objective=ObjectiveConfig(name="mlm+ar"), data=DataConfig(sequence_length=64)
)
ALONE = replace(
    BOTH,
    model=replace(CONFIG.model, head="autoregressive"),
    objective=ObjectiveConfig(name="autoregressive"),
)
SPLITS = {"whole": [(0, 4)], "halves": [(0, 2), (2, 4)], "uneven": [(0, 1), (1, 4)]}


def start(config: RunConfig) -> tuple[ShardedModel, Engine, TrainStep]:
    model = build_model(config, GROUPS)
    model.module.train()
    engine = build_engine(config, model.module, model.specs, GROUPS)
    return model, engine, TrainStep(engine, config, GROUPS)


def batch_of(step: int, is_causal: bool) -> Batch:
    return as_causal(rows(4 * step)) if is_causal else rows(4 * step)


def losses(
    config: RunConfig, split: list[tuple[int, int]], forms: tuple[bool, ...]
) -> list[dict[str, float]]:
    take_step = start(config)[2]
    found = []
    for step, is_causal in enumerate(forms):
        batch = batch_of(step, is_causal)
        result = take_step(step, [part(batch, *bounds) for bounds in split])
        found.append({"loss": result.loss, "norm": result.outcome.grad_norm, **result.metrics})
    return found


FORMS = {"both": (BOTH, (True, False, True, False)), "alone": (ALONE, (True, True, True))}


@pytest.mark.parametrize("name", FORMS)
def test_micro_batches_and_recomputation_do_not_change_the_objective(name: str) -> None:
    config, forms = FORMS[name]
    expected = losses(config, SPLITS["whole"], forms)
    assert all(math.isfinite(step["loss"]) for step in expected)
    for split in SPLITS.values():
        for ours, theirs in zip(losses(config, split, forms), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    recomputed = replace(config, parallel=ParallelConfig(recompute="full"))
    for ours, theirs in zip(losses(recomputed, SPLITS["whole"], forms), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_step_reports_the_form_of_its_batch() -> None:
    found = losses(BOTH, SPLITS["whole"], (True, False))
    assert found[0]["loss"] == found[0]["autoregressive_loss"]
    assert found[1]["loss"] == found[1]["masked_loss"]
    assert "masked_loss" not in found[0]
    assert "autoregressive_loss" not in found[1]


def test_an_autoregressive_step_of_both_is_that_of_the_autoregressive_objective() -> None:
    assert (
        losses(BOTH, SPLITS["whole"], (True,))[0]["loss"]
        == losses(ALONE, SPLITS["whole"], (True,))[0]["loss"]
    )


def test_validation_measures_both_forms() -> None:
    model = start(BOTH)[0]
    masked = [rows(100), part(rows(200), 0, 3)]
    causal = [as_causal(batch) for batch in masked]

    def measure(config: RunConfig, batches: list[Batch]) -> dict[str, float]:
        evaluation = evaluate(model.module, batches, GROUPS, build_objective(config))
        assert evaluation is not None
        return evaluation.metrics

    both = measure(BOTH, [*masked, *causal])
    model = start(CONFIG)[0]
    alone = measure(CONFIG, masked)
    assert {name: both[name] for name in alone} == alone
    model = start(ALONE)[0]
    following = measure(ALONE, causal)
    assert following["num_targets"] == 7 * 11
    for name in ("loss", "perplexity", "accuracy"):
        assert both[f"autoregressive_{name}"] == following[name]
    assert following["perplexity"] == pytest.approx(math.exp(following["loss"]))


def test_flops_are_the_mean_of_the_forms() -> None:
    masked, causal = (build_objective(c).training_flops(64, 4) for c in (CONFIG, ALONE))
    assert causal > masked
    quarter = replace(BOTH.objective, autoregressive_fraction=0.25)
    mixed = build_objective(replace(BOTH, objective=quarter)).training_flops(64, 4)
    assert mixed == pytest.approx(0.75 * masked + 0.25 * causal)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"objective": ObjectiveConfig(name="autoregressive")}, "does not fit model.head=mlm"),
    (
        {"objective": ObjectiveConfig(name="mlm+ar", autoregressive_fraction=1.0)},
        "objective.autoregressive_fraction=1 has batches of one form only",
    ),
    (
        {"objective": ObjectiveConfig(name="mlm+ar", autoregressive_fraction=0.01)},
        "leaves the spike guard too few",
    ),
    (
        {
            "model": replace(CONFIG.model, type_vocab_size=2, next_sentence_head=True),
            "data": DataConfig(sequence_length=64, packing="segment_pair"),
        },
        "objective.name=mlm\\+ar has no pairs",
    ),
]


@pytest.mark.parametrize(("sections", "message"), WRONG)
def test_refused(sections: dict[str, Any], message: str) -> None:
    validate(BOTH)
    validate(ALONE)
    validate(
        replace(
            BOTH,
            guard=GuardConfig(spike_sigmas=0),
            objective=replace(BOTH.objective, autoregressive_fraction=0.01),
        )
    )
    with pytest.raises(ConfigError, match=message):
        validate(replace(BOTH, **sections))
