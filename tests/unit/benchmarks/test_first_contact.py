"""The stages of a first contact with a GPU: order, limits, fallbacks, and a second start."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import first_contact
from benchmarks.gpu.first_contact import STAGES, TOTAL_SECONDS, FirstContact, goals, summary
from benchmarks.gpu.record import Options, result_path

WRONG = {"attention": {"wrong": ["error of result 0 is 1"]}}
RIGHT = {"attention": {"wrong": []}}


class Runs:
    """Stands in for the processes of the stages.

    Attributes:
        results: items or an error by stage; items by ``TRITON_PTXAS_PATH`` or the like.
        begun: stage and added variables of each process.
    """

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.begun: list[tuple[str, dict[str, str]]] = []

    def __call__(
        self, command: list[str], options: Options, *, environment: dict[str, str], **_: Any
    ) -> str | None:
        self.begun.append((options.part, environment))
        result = self.results.get(options.part, RIGHT)
        if callable(result):
            result = result(environment)
        if isinstance(result, str):
            return result
        path = result_path(options)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"items": result, "left": []}))
        return None


def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs, **changes: Any
) -> tuple[int, Runs, list[dict[str, Any]]]:
    """Run all stages with stand-ins; return the exit code, the processes and the lines."""
    monkeypatch.setattr(first_contact, "run_restarting", runs)
    monkeypatch.setattr(first_contact, "CARRIED", folder / "nothing carried")
    monkeypatch.setattr(first_contact.FirstContact, "_prepare_shards", lambda _: Finished())
    arguments = {
        "out": folder / "out", "work": folder / "work", "previous": folder / "none", "only": None,
        "device": "cpu", "small": False, "total_seconds": TOTAL_SECONDS, "limit_factor": None,
    }  # fmt: skip
    code = FirstContact(argparse.Namespace(**(arguments | changes))).run()
    lines = (folder / "out" / "stages.jsonl").read_text().splitlines()
    return code, runs, [json.loads(line) for line in lines]


class Finished:
    def wait(self) -> None: ...
    def kill(self) -> None: ...


def test_a_failed_stage_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {"attention": "the process ended with -9", "layers": "took too long"}
    code, runs, lines = start(tmp_path, monkeypatch, Runs(results))
    assert code == 1
    assert [stage for stage, _ in runs.begun] == [stage.name for stage in STAGES]
    states = {line["stage"]: line["state"] for line in lines}
    assert states.pop("attention") == "failed"
    assert states.pop("layers") == "too long"
    assert set(states.values()) == {"passed"}
    assert (tmp_path / "out" / "logs.tar.xz").exists()
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 6
    assert "layers" in (tmp_path / "out" / "summary.txt").read_text()


def test_a_second_start_runs_what_failed_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, monkeypatch, Runs({"attention": WRONG}))
    code, runs, lines = start(tmp_path, monkeypatch, Runs({}))
    assert code == 0
    assert [stage for stage, _ in runs.begun] == ["attention"]
    assert len(lines) == len(STAGES)
    digest = first_contact.digest
    monkeypatch.setattr(
        first_contact, "digest", lambda c: "new" if c is STAGES[0].covers else digest(c)
    )
    assert [stage for stage, _ in start(tmp_path, monkeypatch, Runs({}))[1].begun] == [
        STAGES[0].name
    ]
    _, runs, _ = start(tmp_path, monkeypatch, Runs({}), only=["attention"])
    assert [stage for stage, _ in runs.begun] == ["attention"]
    moved = tmp_path / "elsewhere"
    _, runs, _ = start(moved, monkeypatch, Runs({}), previous=tmp_path / "work" / "stages.jsonl")
    assert not runs.begun


@pytest.mark.parametrize(
    ("right_with", "expected"),
    [
        ("TRITON_PTXAS_PATH", "TRITON_PTXAS_PATH"),
        (first_contact.ONE_STAGE, first_contact.ONE_STAGE),
        ("nothing", "MEGATRON_DEBERTA_ATTENTION"),
    ],
)
def test_wrong_kernels_are_compiled_differently_or_left_out(
    right_with: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(FirstContact, "_other_ptxas", lambda self: self.work / "ptxas")
    results = {"numerics": lambda variables: RIGHT if right_with in variables else WRONG}
    _, runs, lines = start(tmp_path, monkeypatch, Runs(results))
    tried = [line["stage"] for line in lines if line["stage"].startswith("numerics")]
    order = ["numerics", "numerics, another ptxas", "numerics, one pipeline stage"]
    assert tried == (order[:2] if right_with == "TRITON_PTXAS_PATH" else order)
    later = [variables for stage, variables in runs.begun if stage == "step"]
    assert [expected in variables for variables in later] == [True]


@pytest.mark.parametrize(
    "result", [{"cross-entropy bfloat16": {"wrong": ["error of result 1"]}}, "took too long"]
)
def test_other_operators_and_slow_kernels_change_nothing(
    result: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, runs, _ = start(tmp_path, monkeypatch, Runs({"numerics": result}))
    assert code == 1
    assert [stage for stage, _ in runs.begun] == [stage.name for stage in STAGES]
    assert not any("MEGATRON_DEBERTA_ATTENTION" in variables for _, variables in runs.begun)


def test_stages_end_within_the_time_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(stage.seconds for stage in STAGES[:4]) <= 5 * 60
    now = [0.0]
    monkeypatch.setattr(first_contact.time, "monotonic", lambda: now[0])

    class TakesAll(Runs):
        def __call__(self, *args: Any, seconds: float, **options: Any) -> str:
            now[0] += seconds
            super().__call__(*args, **options)
            return "took too long"

    code, _, lines = start(tmp_path, monkeypatch, TakesAll({}))
    assert code == 1
    assert now[0] <= TOTAL_SECONDS - first_contact.PACK_SECONDS
    assert lines[-1]["state"] == "not started"


STAGE = {
    "state": "passed", "seconds": 9.0, "limit_seconds": 70.0, "wrong": [], "error": None,
    "hardware": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "revision": "", "source": "s",
}  # fmt: skip


def test_goals_are_computed_from_the_items() -> None:
    seconds = {"4 layers": 0.1, "12 layers": 0.18, "4 layers, plain attention": 0.09,
               "12 layers, plain attention": 0.165}  # fmt: skip
    sides = {"ours": {"seconds": 0.1, "tokens_per_second": 3e5}, "modernbert": {"seconds": 0.12}}
    lines = [
        STAGE | {"stage": "layers", "items": {k: {"seconds_per_step": v} for k, v in
                                              seconds.items()}},
        STAGE | {"stage": "step", "items": {"16k": {"mfu": 0.5, "tokens_per_second": 43210.0}}},
        STAGE | {"stage": "models", "items": {"base": {"sides": sides}}},
    ]  # fmt: skip
    found = goals(lines)
    assert ("milliseconds per layer: 10.00", "", "") in found
    assert ("cost of position terms per layer: 6.7%", "at most 15 %, then 7 %", "met") in found
    assert ("step, 16k: 43,210 tokens/s, 50.0%", "at least 52 %, then 60 %", "MISSED") in found
    assert ("base: 300,000 tokens/s, 1.20 times modernbert", "at least 1.0", "met") in found
    assert "43,210" in summary(lines)
