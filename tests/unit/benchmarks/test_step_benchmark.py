"""Every comparison of the step benchmark, with tiny sizes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.step import compare as step
from benchmarks.step.batch import StepBatch, make_batch
from benchmarks.step.measure import Contender, compete
from benchmarks.step.sides import Ours, Setting
from megatron_deberta.config.schema import ModelConfig

CPU = torch.device("cpu")
TINY = ModelConfig(
    num_layers=3, hidden_size=32, num_heads=2, ffn_hidden_size=64, vocab_size=600,
    max_relative_positions=32, position_buckets=8,
)  # fmt: skip


def tiny_case(comparison: str, name: str = "tiny") -> step.Case:
    return step.Case(name, comparison, TINY, length=64, tokens=128, dtype="fp32")


@pytest.mark.parametrize("comparison", step.COMPARISONS)
def test_every_side_is_timed_and_broken_down(comparison: str) -> None:
    row = step.measure(tiny_case(comparison), CPU, repeats=1)

    sides = row["sides"]
    expected = {
        "huggingface": {"ours", "huggingface"},
        "peers": {"ours", "modernbert", "roberta", "bert"},
        "disentanglement": {"ours", "plain_attention"},
    }
    assert sides.keys() == expected[comparison]
    assert row["loss_difference"].keys() == expected[comparison] - {"ours"}
    assert row["speedup"].keys() == expected[comparison] - {"ours"}
    for side in sides.values():
        assert side["tokens_per_second"] == pytest.approx(128 / side["seconds"])
        assert side["gflop_per_token"] > 0
        assert side["mfu"] > 0
        for part in ("attention", "ffn", "head", "embeddings", "optimizer"):
            assert side["seconds_by_part"][part] > 0, part
        assert side["seconds_by_part"]["rest"] >= 0, "time was counted twice"
    missing = {"disentangled_flash"} if comparison == "huggingface" else set()
    assert row["missing"].keys() == missing
    if comparison == "peers":
        assert (
            "flash-attn" in row["attention_tried"]["modernbert"]["own windows, flash_attention_2"]
        )


def test_encoders_alone_are_timed() -> None:
    row = step.measure(tiny_case("encoder"), CPU, repeats=1)

    assert row["sides"].keys() == {"ours", "huggingface"}
    ours, theirs = row["sides"].values()
    assert ours["gflop_per_token"] == pytest.approx(theirs["gflop_per_token"], rel=0.01)
    for side in (ours, theirs):
        assert side["seconds_by_part"]["attention"] > 0
        assert "head" not in side["seconds_by_part"] or not side["seconds_by_part"]["head"]


def test_micro_batches_have_the_same_gradient() -> None:
    batch = make_batch(TINY, 128, 64, CPU)
    whole, halves = (Contender(Ours(Setting(TINY, CPU, torch.float32)), batch) for _ in range(2))
    halves.parts = batch.split(2)

    whole.accumulate()
    halves.accumulate()

    for one, other in zip(
        whole.side.model.parameters(), halves.side.model.parameters(), strict=True
    ):
        torch.testing.assert_close(other.grad, one.grad)


class SmallMemory(Ours):
    """A side with memory for one row."""

    def loss(self, batch: StepBatch, step: int) -> Tensor:
        if len(batch.samples) > 1:
            raise torch.OutOfMemoryError("too many rows")
        return super().loss(batch, step)


def test_micro_batches_shrink_when_out_of_memory() -> None:
    setting = Setting(TINY, CPU, torch.bfloat16)
    builds = {"ours": lambda: Ours(setting), "small": lambda: SmallMemory(setting)}

    results = compete(builds, make_batch(TINY, 256, 64, CPU), 2, resident=False)

    assert results["ours"].micro_batches == 1
    assert results["small"].micro_batches == 4
    assert [len(result.seconds) for result in results.values()] == [4, 4]


class SlowOurs(Ours):
    def loss(self, batch: StepBatch, step: int) -> Tensor:
        time.sleep(0.5)
        return super().loss(batch, step)


def broken() -> Ours:
    raise RuntimeError("no such kernel")


def test_fastest_setting_is_chosen_and_failures_are_reported() -> None:
    setting = Setting(TINY, CPU, torch.float32)
    builds = {
        "slow": lambda: SlowOurs(setting),
        "broken": broken,
        "fast": lambda: Ours(setting),
    }

    chosen, tried = step.fastest(builds, make_batch(TINY, 128, 64, CPU))

    assert chosen is builds["fast"]
    assert tried["broken"] == "RuntimeError: no such kernel"
    assert float(tried["fast"]) < float(tried["slow"])


def test_ours_may_be_fused_where_peers_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny_case("peers")
    settings: dict[str, list[bool]] = {}

    def last(builds: dict[str, Any], batch: StepBatch) -> tuple[Any, dict[str, float]]:
        sides = [build() for build in builds.values()]
        if isinstance(sides[0], Ours):
            settings["fuse"] = [side.notes["fuse"] for side in sides]
        return list(builds.values())[-1], dict.fromkeys(builds, 1.0)

    monkeypatch.setattr(step, "fastest", last)
    compiled = Setting(TINY, CPU, torch.float32, compile_peers=True)
    monkeypatch.setattr(step.Case, "setting", lambda self, device: compiled)
    batch, builds = make_batch(TINY, 128, 64, CPU), step.sides(case, CPU)

    tried = step.choose_variants(case, CPU, batch, builds)

    assert settings == {"fuse": [False, True]}
    assert tried["ours"] == {"parallel.fuse=false": 1.0, "parallel.fuse=true": 1.0}
    with torch.compiler.set_stance("force_eager"):
        fused, plain = (side.loss(batch, 1) for side in (builds["ours"](), Ours(compiled)))
    torch.testing.assert_close(fused, plain)


def test_interrupted_comparison_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [tiny_case("huggingface", "one"), tiny_case("huggingface", "two")]
    monkeypatch.setattr(step, "cases", lambda comparison, device: known)
    monkeypatch.setattr(step, "add_peak_of_processes", lambda case, row: None)
    measured: list[str] = []

    def fake_measure(case: step.Case, device: torch.device, repeats: int) -> dict[str, object]:
        measured.append(case.name)
        return {"name": case.name, "sides": {}, "speedup": {}}

    monkeypatch.setattr(step, "measure", fake_measure)
    output = tmp_path / "step.json"

    assert step.run("huggingface", CPU, output, names=["two"])
    assert not step.run("huggingface", CPU, output, deadline=0.0)
    assert step.run("huggingface", CPU, output)

    assert measured == ["two", "one"]
    assert [row["name"] for row in json.loads(output.read_text())["results"]] == ["one", "two"]
