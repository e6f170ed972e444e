"""The ablation experiment: variants, resumption of runs, and the table of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.learn import ablations as learn
from benchmarks.learn import same_batches
from benchmarks.lib.provenance import ROOT
from benchmarks.tables import pages as tables
from benchmarks.tables.common import UNMEASURED
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.model.task_models import parameter_shapes

CONFIGS = ROOT / "configs" / "runs"


def experiment(folder: Path, config: str = "learn_cpu", **changes: tuple) -> learn.Experiment:
    data = folder / "books"
    Path(f"{data}.manifest.json").write_text(json.dumps({"vocab_size": 8200}))
    options = {"variants": tuple(learn.VARIANTS), "seeds": (1,), **changes}
    return learn.Experiment(
        CONFIGS / f"{config}.yaml", str(data), "tokenizer", folder / "runs", **options
    )


@pytest.mark.parametrize("config", ["learn_cpu", "learn_gpu"])
def test_variants_are_the_named_models(config: str, tmp_path: Path) -> None:
    runs = experiment(tmp_path, config)
    names = {run.variant: set(parameter_shapes(runs.config(run).model)) for run in runs.runs()}
    whole = names["DeBERTa"]
    last = ".attention.position_"

    assert whole - names["-EMD"] == {"mask_decoder.position.weight"}
    assert all(f"{last}query" in name for name in whole - names["-P2C"])
    assert all(f"{last}key" in name for name in whole - names["-C2P"])
    without_both = whole - names["-(C2P+P2C)"]
    assert without_both > (whole - names["-P2C"]) | (whole - names["-C2P"])
    assert not [name for name in names["+shared projections"] if last in name]
    assert {name for name in names["+convolution"] if "conv" in name}
    assert not [name for name in names["RoBERTa"] if last in name or "mask_decoder" in name]
    assert "embeddings.position.weight" in names["RoBERTa"]
    assert len({run.folder for run in runs.runs()}) == len(learn.VARIANTS)


def write_metrics(run: learn.Run, steps: int, loss: float) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    records = [
        {"step": 0, "kind": "validation", "unigram_loss": 6.5},
        {"step": steps, "kind": "validation", "loss": loss},
    ]
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (run.folder / "metrics.jsonl").write_text(text)


def test_finished_runs_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = experiment(tmp_path, variants=("DeBERTa", "-EMD"), seeds=(1, 2))
    started: list[str] = []

    def interrupted_once(_: learn.Experiment, run: learn.Run, seconds: float) -> int:
        started.append(run.folder.name)
        if run.folder.name == "no-emd-1" and started.count("no-emd-1") == 1:
            monkeypatch.setattr(learn.time, "monotonic", lambda: 1e9)
            return EXIT_REQUEUE
        write_metrics(run, 480, 6.0)
        return EXIT_DONE

    monkeypatch.setattr(learn, "_pretrain", interrupted_once)
    monkeypatch.setattr(learn.time, "monotonic", lambda: 0.0)
    learn.train(runs, budget_seconds=10.0)
    assert started == ["deberta-1", "no-emd-1"]

    learn.train(runs, budget_seconds=10.0)
    assert started[2:] == ["no-emd-1", "deberta-2", "no-emd-2"]


def test_table_has_the_mean_of_finished_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = experiment(tmp_path, variants=("DeBERTa", "-EMD", "-C2P"), seeds=(1, 2))
    reached = ((480, 5.0), (480, 5.5), (80, 6.4), (480, 5.2), (80, 6.0), (80, 6.6))
    for run, (steps, loss) in zip(runs.runs(), reached, strict=True):
        write_metrics(run, steps, loss)
    output = tmp_path / "benchmarks" / "results" / "cpu" / "learn"
    output.parent.mkdir(parents=True)

    record = learn.collect(runs, output)
    timed = {"seconds_per_step": {"-EMD": 0.25}, "timed": {"load": 0.5}}
    output.with_suffix(".json").write_text(json.dumps(record | timed))
    learn.plot(record, output.with_suffix(".png"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    table = tables.TABLES["learn"]("cpu")

    assert record["unigram_loss"] == 6.5
    assert "| DeBERTa | 2 | 5.100 | +0.000 |" in table
    assert "| -EMD | 1 | 5.500 | +0.400 | 0.25 |" in table
    assert "steps timed at load 0.5" in table
    assert "| -C2P | 0 | 6.500 at step 80 |  |" in table
    assert f"| RoBERTa | 0 | {UNMEASURED} |" in table
    assert output.with_suffix(".png").stat().st_size > 0


def test_timing_the_steps_keeps_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment(tmp_path)
    output = tmp_path / "learn"
    curve = [{"variant": "DeBERTa", "seed": 1, "validation": [{"step": 480, "loss": 6.0}]}]
    before = {"runs": curve, "tokens_per_step": 1024, "seconds_per_step": {}, "revision": "old"}
    output.with_suffix(".json").write_text(json.dumps(before))
    monkeypatch.setattr(learn, "time_steps", lambda runs, repeats: {"DeBERTa": repeats / 10})
    arguments = ["--config", str(CONFIGS / "learn_cpu.yaml"), "--data", str(tmp_path / "books"),
                 "--tokenizer", "t", "--runs", str(tmp_path / "gone"), "--time", "5"]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["learn.py", *arguments, "--output", str(output)])

    learn.main()

    after = json.loads(output.with_suffix(".json").read_text())
    assert after.pop("timed")["hardware"]
    assert after == {**before, "seconds_per_step": {"DeBERTa": 0.5}}
    assert output.with_suffix(".png").stat().st_size > 0


def test_intervals_of_the_same_batches_are_paired_by_seed() -> None:
    """Four seeds, one of them of the first steps only; t(0.975, 2) is 4.3027."""
    offsets = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.6}
    runs = []
    for seed, offset in offsets.items():
        for variant, added in ((same_batches.WITH, offset), (same_batches.WITHOUT, 0.0)):
            losses = {"100": seed + added} | ({"200": seed - added} if seed < 4 else {})
            runs.append({"variant": variant, "seed": seed, "validation": losses})
    record = {"steps": 200, "runs": runs}
    pair = (same_batches.WITH, same_batches.WITHOUT, "validation")
    full = same_batches.common_seeds(record, 200)
    found = same_batches.differences(record, *pair, full)

    assert full == [1, 2, 3]
    assert same_batches.common_seeds(record, 100) == [1, 2, 3, 4]
    assert found[100] == pytest.approx((0.2, 4.3027 * 0.1 / 3**0.5), rel=1e-4)
    assert found[200] == pytest.approx((-0.2, 4.3027 * 0.1 / 3**0.5), rel=1e-4)
    every = same_batches.differences(record, *pair, offsets)
    assert every[100][0] == pytest.approx(0.3)
    assert every[200] == found[200]
    assert same_batches.mean_curve(record, same_batches.WITH, "validation")[100] == 2.2
