"""Predicted times against the formula of FLOPs, waits of a step, and the smoke part's rules."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import kernel_checks, smoke, suite
from benchmarks.gpu.record import Options, Record
from benchmarks.lib.provenance import ROOT
from benchmarks.step import synchronizations
from benchmarks.step.predicted import SIDES, Side, predict
from megatron_deberta.config.schema import ModelConfig

MODEL = ModelConfig(
    num_layers=5,
    hidden_size=256,
    num_heads=4,
    ffn_hidden_size=1024,
    vocab_size=2000,
    max_relative_positions=512,
    position_buckets=256,
    conv_kernel_size=3,
)


@pytest.mark.parametrize(
    "side", [SIDES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in SIDES[1:])],
    ids=lambda side: side.device,
)  # fmt: skip
def test_flops_are_those_of_the_formula(side: Side) -> None:
    """Backward of attention repeats the scores, which the formula does not count."""
    found = predict(MODEL, 4, side)
    flops = sum(kind["flops"] for kind in found["kinds"].values())
    assert found["formula_flops"] * 0.97 < flops < found["formula_flops"] * 1.4
    kinds = found["kinds"]
    assert {"attention", "matrix products", "normalisation"} <= kinds.keys()
    assert ("loss" in kinds) == side.fused  # eager: elementwise
    for kind in kinds.values():
        assert kind["seconds"] > 0
        assert kind["bytes"] > 0


def test_a_step_waits_for_the_device_once() -> None:
    """The host reads one vector per step; the engine adds no synchronization."""
    places, _ = synchronizations.measure()
    assert places == {"tolist in megatron_deberta/train/step.py, decide": 1}


def test_smoke_part_ends_after_three_minutes_on_a_gpu() -> None:
    args = argparse.Namespace(device="cuda", minutes=6.0)
    assert suite.minutes_of(args, "smoke") + suite.SMOKE_GRACE_MINUTES <= 3
    assert suite.minutes_of(args, "step") == 6
    assert suite.PARTS[0] == "smoke"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_smoke_checks_of_the_kernels_pass(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    for item in (kernel_checks.layer_norm("cpu", dtype), kernel_checks.cross_entropy("cpu", dtype)):
        assert not item["wrong"], item


@pytest.mark.slow
def test_attention_at_full_size_is_compared_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for name, value in (("FULL_BATCH", 1), ("FULL_HEADS", 3), ("CPU_REPEATS", 1)):
        monkeypatch.setattr(kernel_checks, name, value)
    monkeypatch.setattr(kernel_checks, "FULL_POSITIONS", kernel_checks.POSITIONS)
    item = kernel_checks.full_size_attention("cpu", torch.float16, 32, 24)
    assert not item["wrong"], item
    right = torch.ones(1, 3, 24, 32)
    wrong = right.clone()
    wrong[:, 2] *= 1.02
    assert kernel_checks.relative_error(wrong, right, by_head=True) == pytest.approx(0.02, rel=1e-3)
    assert kernel_checks.relative_error(wrong, right, by_head=False) < 0.012


@pytest.mark.nightly
def test_smoke_part_launches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows have tiles beyond the reach of the position table."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launched: set[str] = set()
    launch = interpreter.InterpretedFunction.run

    def record(kernel: Any, *arguments: Any, **options: Any) -> Any:
        launched.add(kernel.fn.__name__)
        return launch(kernel, *arguments, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", record)
    monkeypatch.setattr(kernel_checks, "CPU_REPEATS", 1)
    for gathered, documents in (("gathered", False), ("", True), ("", False)):
        if not gathered and not documents:
            monkeypatch.setattr(kernel_checks, "CPU_LENGTH", 136)
        item = kernel_checks.attention("cpu", torch.float32, 32, gathered, documents)
        assert not item["wrong"], item
    for item in (
        kernel_checks.layer_norm("cpu", torch.float32),
        kernel_checks.bias_gelu("cpu", torch.float32),
        kernel_checks.cross_entropy("cpu", torch.float32),
    ):
        assert not item["wrong"], item
    sources = (ROOT / "megatron_deberta" / "ops" / "triton").glob("*.py")
    defined = {
        name
        for path in sources
        for name in re.findall(r"^def ([a-z]\w*_kernel)\(", path.read_text(), re.M)
    }
    assert launched == defined


@pytest.mark.slow
def test_smoke_check_of_attention_passes_and_failures_print_their_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    item = kernel_checks.attention("cpu", torch.float16, 32, "gathered")
    assert not item["wrong"], item
    record = Record(Options("smoke", tmp_path, tmp_path, "cpu", small=True, minutes=1))

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(kernel_checks, "layer_norm", broken)
    monkeypatch.setattr(kernel_checks, "cross_entropy", lambda *_: {"wrong": []})
    kernel_checks.check_kernels(record, torch.float32)
    assert "in broken" in capsys.readouterr().err
    assert "no such kernel" in record.items["layer norm float32"]["error"]
    assert "error" not in record.items["cross-entropy float32"]


SANITIZER = """#!/bin/sh
test "$1 $2 $3 $4" = "--tool racecheck --error-exitcode 9" || exit 3
shift 4
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        pytest.param(
            SANITIZER + '"$@" && echo "RACECHECK SUMMARY: 0 hazards"',
            [],
            marks=pytest.mark.nightly,
        ),
        (SANITIZER + "exit 9", ["exit code 9"]),
        pytest.param("#!/bin/sh", ["the kernels did not run"], marks=pytest.mark.nightly),
    ],
    ids=["passed", "race", "nothing"],
)
def test_racecheck_runs_the_gathered_kernels_and_reports_races(
    script: str, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for compute-sanitizer runs its command, in the interpreter on a CPU."""
    pytest.importorskip("triton")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    item = smoke.racecheck("cpu")
    assert [line.split(":")[0] for line in item["wrong"]] == wrong
    assert wrong or item["summary"] == ["RACECHECK SUMMARY: 0 hazards"]
