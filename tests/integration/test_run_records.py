"""What a run writes for its report, over a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.jobs import Run


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_are_cut_on_resume_and_the_timeline_is_not(pretrain: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    every = ("train.eval_every=1", "train.eval_batches=1", "log.every=1", "checkpoint.save_every=1")
    assert pretrain(*every, "log.samples=1")[0] == 0
    before = records(run / "samples.jsonl")
    assert [record["step"] for record in before] == [1, 2]
    # As if the checkpoint of step 2 had been lost.
    for path in sorted((run / "checkpoints").glob("step_*2/*")):
        path.unlink()
    assert pretrain(*every, "log.samples=1", "train.exit_step=3")[0] == 0
    samples = records(run / "samples.jsonl")
    assert [record["step"] for record in samples] == [1, 2, 3]
    # The repeated step is the same, bit for bit.
    assert samples[:2] == before
    assert len({sample["sample"] for record in samples for sample in record["samples"]}) == 1
    events = [(record["event"], record["step"]) for record in records(run / "timeline.jsonl")]
    assert events == [
        ("start", 0), ("steps", 1), ("steps", 2), ("end", 2),
        ("start", 1), ("steps", 2), ("steps", 3), ("end", 3),
    ]  # fmt: skip
