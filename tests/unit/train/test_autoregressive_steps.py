"""Training steps and validation of autoregressive objectives in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron_deberta.config import validate
from megatron_deberta.config.schema import (
    DataConfig,
    ObjectiveConfig,
    RunConfig,
    StabilityConfig,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.objectives import build_objective
from tests.support.objective_layouts import as_causal
from tests.support.selection import every
from tests.unit.train.test_step import CONFIG, SPLITS, part, rows, start, validated

BOTH = replace(
    CONFIG, objective=ObjectiveConfig(name="mlm+ar"), data=DataConfig(sequence_length=64)
)
ALONE = replace(
    BOTH,
    model=replace(CONFIG.model, head="autoregressive"),
    objective=ObjectiveConfig(name="autoregressive"),
)


def losses(
    config: RunConfig, split: list[tuple[int, int]], forms: tuple[bool, ...]
) -> list[dict[str, float]]:
    take_step = start(config)[2]
    found = []
    for step, is_causal in enumerate(forms):
        batch = as_causal(rows(4 * step)) if is_causal else rows(4 * step)
        result = take_step(step, [part(batch, *bounds) for bounds in split])
        found.append({"loss": result.loss, "norm": result.outcome.grad_norm, **result.metrics})
    return found


FORMS = {"both": (BOTH, (True, False, True, False)), "alone": (ALONE, (True, True, True))}


@pytest.mark.parametrize("name", every(2, FORMS, ["slow"]))
def test_micro_batches_and_recomputation_do_not_change_the_objective(name: str) -> None:
    config, forms = FORMS[name]
    expected = losses(config, SPLITS["whole"], forms)
    assert all(math.isfinite(step["loss"]) for step in expected)
    for split in SPLITS.values():
        for ours, theirs in zip(losses(config, split, forms), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    recomputed = replace(config, parallel=replace(config.parallel, recompute="full"))
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
    masked = [rows(100), part(rows(200), 0, 3)]
    causal = [as_causal(batch) for batch in masked]
    both = validated(start(BOTH)[0], [*masked, *causal], BOTH)
    alone = validated(start(CONFIG)[0], masked)
    assert {name: both[name] for name in alone} == alone
    following = validated(start(ALONE)[0], causal, ALONE)
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


RARE = replace(BOTH.objective, autoregressive_fraction=0.01)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": ObjectiveConfig(name="autoregressive")}, "does not fit model.head=mlm"),
        ({"objective": replace(BOTH.objective, autoregressive_fraction=1.0)},
         "objective.autoregressive_fraction=1 has batches of one form only"),
        ({"objective": RARE}, "leaves the spike guard too few"),
        ({"model": replace(CONFIG.model, type_vocab_size=2, next_sentence_head=True),
          "data": DataConfig(sequence_length=64, packing="segment_pair")},
         "objective.name=mlm\\+ar has no pairs"),
    ],
)  # fmt: skip
def test_refused(sections: dict[str, Any], message: str) -> None:
    validate(BOTH)
    validate(ALONE)
    validate(replace(BOTH, stability=StabilityConfig(spike_sigmas=0), objective=RARE))
    with pytest.raises(ConfigError, match=message):
        validate(replace(BOTH, **sections))
