"""A step that fails is run again on the same and on another rank; three kinds of causes."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import StabilityConfig
from megatron_deberta.engine import schedule
from megatron_deberta.errors import EXIT_FAILURE, ReplicaError
from megatron_deberta.objectives import ModelLosses
from megatron_deberta.train.stability.replicas import check_replicas
from megatron_deberta.train.stability.rerun import RerunStep, Verdict, report_verdict
from megatron_deberta.train.state import FolderLock
from tests.support.layout_matrix import (
    GLOBAL_BATCH,
    Layout,
    build,
    micro_batches,
    moments,
    run_config,
)
from tests.support.losses import with_first_loss
from tests.support.ranks import RankPool, grid

STEPS, FAULTY_STEP, FAULTY_RANK = 3, 1, 2
LAYER = "encoder.layers.1.ffn.down.weight"
LAYOUTS = [
    Layout(1, 0, False, "none"),
    Layout(2, 1, True, "none"),
    Layout(1, 2, False, "none"),
    Layout(1, 3, False, "none"),
    Layout(2, 3, False, "full"),
]


def flipped(gradient: Tensor) -> Tensor:
    """Set all bits of one gradient's exponent, so that it is infinite or NaN."""
    changed = gradient.clone().view(-1)
    integer, exponent = (
        (torch.int32, 0x7F800000) if changed.element_size() == 4 else (torch.int16, 0x7F80)
    )
    changed.view(integer)[len(changed) // 2] |= exponent
    return changed.view_as(gradient)


class Fault:
    """A fault of one rank's device, or of the data.

    Args:
        kind: ``once``: bits of one gradient flip once; ``always``: this rank computes one
            gradient wrong whenever it computes it from a step on; ``data``: one sample has no
            finite loss, on whichever rank; ``none``.
    """

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.is_faulty = kind, rank == FAULTY_RANK
        self.step = self.count = 0

    def gradient(self, gradient: Tensor) -> Tensor:
        is_due = self.step >= FAULTY_STEP if self.kind == "always" else self.step == FAULTY_STEP
        if self.kind not in ("once", "always") or not self.is_faulty or not is_due:
            return gradient
        self.count += 1
        return gradient if self.kind == "once" and self.count > 1 else flipped(gradient)

    def loss(self, module: Any, args: Any, out: ModelLosses) -> ModelLosses:
        sample = FAULTY_STEP * GLOBAL_BATCH + 3
        if self.kind != "data" or sample not in args[0].sample_index.tolist():
            return out
        return with_first_loss(out, lambda loss: loss * math.nan)


def train(
    rank: int, layout: Layout, kind: str, precision: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train with a fault; return losses, skips, verdicts, the error and the last moments."""
    config, groups, fault = run_config(layout), grid(layout.tp_size), Fault(kind, rank)
    changed = replace(config.precision, **precision or {})
    config = replace(config, stability=StabilityConfig(rerun=True), precision=changed)

    def watch(module: nn.Module) -> None:
        # Before the engine's and the record's hooks, like a fault of the device.
        module.get_parameter(LAYER).register_hook(fault.gradient)

    # The first overflow at the smallest loss scale counts.
    with mock.patch.object(schedule, "HYSTERESIS", 1):
        model, engine = build(config, groups, watch)
    engine.module.register_forward_hook(fault.loss)
    verdicts: list[Verdict] = []
    take = RerunStep(engine=engine, config=config, groups=groups, on_verdict=verdicts.append)
    found: dict[str, Any] = {"steps": [], "error": "", "verdicts": verdicts}
    try:
        for fault.step in range(STEPS):
            result = take(fault.step, micro_batches(fault.step, groups))
            found["steps"].append((repr(result.loss), repr(result.outcome.grad_norm), result.skip))
        found["last"] = moments(engine, model.specs)
    except ReplicaError as error:
        found["error"], found["code"] = str(error), error.exit_code
    engine.destroy()
    return found


def check_ranks(results: list[dict[str, Any]], kind: str, ranks: list[int]) -> None:
    """Check that all ranks have the same verdict, with host and device."""
    for result in results:
        (verdict,) = result["verdicts"]
        assert (verdict.step, verdict.kind) == (FAULTY_STEP + 1, kind), str(verdict)
        assert [place.rank for place in verdict.places] == ranks, str(verdict)
        for place in verdict.places:
            assert (place.host, place.device) == (socket.gethostname(), "cpu")


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS[0],
        *(pytest.param(layout, marks=pytest.mark.nightly) for layout in LAYOUTS[1:]),
    ],
    ids=lambda layout: layout.name,
)
def test_three_causes_have_three_verdicts(four_ranks: RankPool, layout: Layout) -> None:
    expected = four_ranks.run(train, layout, "none")
    assert not any(result["verdicts"] for result in expected)

    transient = four_ranks.run(train, layout, "once")
    check_ranks(transient, "transient", [FAULTY_RANK])
    for result, unbroken in zip(transient, expected, strict=True):
        # The run goes on as if nothing had happened.
        assert result["steps"] == unbroken["steps"]
        for name, (_, moment) in unbroken["last"].items():
            assert result["last"][name][1].equal(moment), name

    persistent = four_ranks.run(train, layout, "always")
    check_ranks(persistent, "persistent", [FAULTY_RANK])
    for result, unbroken in zip(persistent, expected, strict=True):
        assert result["steps"] == unbroken["steps"][:FAULTY_STEP]
        start = (
            f"step {FAULTY_STEP + 1}: gradient not finite; run again: a persistent fault on rank 2"
        )
        assert result["error"].startswith(start)
        assert result["code"] == EXIT_FAILURE

    data = four_ranks.run(train, layout, "data")
    check_ranks(data, "reproducible", [])
    for result in data:
        skips = [skip for _, _, skip in result["steps"]]
        assert skips == [None, "loss not finite", None]


@pytest.mark.slow
def test_gradients_of_16_bits(four_ranks: RankPool) -> None:
    found = four_ranks.run(train, LAYOUTS[1], "data", {"dtype": "bf16"})
    check_ranks(found, "reproducible", [])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS[1], marks=pytest.mark.nightly),
        pytest.param(LAYOUTS[2], marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_overflow_at_the_smallest_loss_scale(four_ranks: RankPool, layout: Layout) -> None:
    """An overflow is no fault while the scale can be lower; at its minimum it is examined."""
    higher = {"dtype": "fp16", "initial_loss_scale_power": 3}
    for result in four_ranks.run(train, layout, "once", higher):
        assert result["steps"][FAULTY_STEP][2] == "overflow"
        assert not result["verdicts"]
    smallest = {**higher, "min_loss_scale": 8.0}
    expected = four_ranks.run(train, layout, "none", smallest)
    transient = four_ranks.run(train, layout, "once", smallest)
    check_ranks(transient, "transient", [FAULTY_RANK])
    assert [r["steps"] for r in transient] == [r["steps"] for r in expected]
    persistent = four_ranks.run(train, layout, "always", smallest)
    check_ranks(persistent, "persistent", [FAULTY_RANK])
    for result in persistent:
        assert "overflows at the smallest loss scale; run again: a persistent" in result["error"]


class Lock(FolderLock):
    """Notes the faults of the job history."""

    def __init__(self) -> None:
        self.faults: list[dict[str, Any]] = []

    def record_fault(self, *, step: int, verdict: str, places: Any) -> None:
        self.faults.append({"step": step, "verdict": verdict, "places": places})


def differing_replicas(
    rank: int, kind: str
) -> tuple[list[Verdict], list[int], str, list[dict[str, Any]]]:
    """Flip a bit of one rank's weights, then train on a rank that computes right or wrong.

    Returns:
        Verdicts, ranks that differ, the error that ends the run, and faults in the job history.
    """
    config, groups = run_config(LAYOUTS[0]), grid(1)
    config = replace(config, stability=StabilityConfig(rerun=True))
    fault = Fault(kind, rank)
    model, engine = build(
        config, groups, lambda module: module.get_parameter(LAYER).register_hook(fault.gradient)
    )
    parameter = model.module.get_parameter(LAYER)
    verdicts: list[Verdict] = []
    lock = Lock()

    def report(verdict: Verdict) -> None:
        verdicts.append(verdict)
        report_verdict(verdict, groups, None, lock)

    take = RerunStep(engine=engine, config=config, groups=groups, on_verdict=report)
    take(0, micro_batches(0, groups))
    if rank == FAULTY_RANK:
        parameter.data.view(-1).view(torch.int32)[5] ^= 1 << 20
    ranks, message = [], ""
    try:
        check_replicas(engine.module, model.specs, groups, 1)
    except ReplicaError as error:
        ranks = sorted({r for found in error.differing.values() for r in found})
        fault.step = FAULTY_STEP
        message = str(take.explained(error, model.specs))
        check_replicas(engine.module, model.specs, groups, 1)
    engine.destroy()
    return verdicts, ranks, message, lock.faults


@pytest.mark.parametrize(("kind", "expected"), [("none", "transient"), ("always", "persistent")])
def test_differing_replicas(four_ranks: RankPool, kind: str, expected: str) -> None:
    place = {"rank": FAULTY_RANK, "host": socket.gethostname(), "device": "cpu"}
    fault = {"step": 1, "verdict": expected, "places": [place]}
    results = four_ranks.run(differing_replicas, kind)
    for rank, (verdicts, ranks, message, faults) in enumerate(results):
        assert ranks == [FAULTY_RANK]
        (verdict,) = verdicts
        assert f"; {verdict}" in message
        assert faults == ([fault] if rank == 0 else [])
        assert verdict.kind == expected, str(verdict)
        assert [place.rank for place in verdict.places] == [FAULTY_RANK]
        assert verdict.step == 1
