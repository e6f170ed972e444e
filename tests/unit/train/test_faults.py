"""Verdicts about devices reach the log, the metrics, the job history and the bad nodes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from megatron_deberta.cluster.run_lock import RunLock
from megatron_deberta.cluster.slurm.history import FILE_NAME, BadNodes, JobHistory
from megatron_deberta.config.schema import CheckpointConfig, RunConfig, TrainConfig
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.observe.metrics import read_metrics
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.setup import choose_background_saves
from megatron_deberta.train.stability.rerun import Kind, Place, Verdict, report_verdict

GROUPS = single_process_groups(torch.device("cpu"))
PLACE = Place(3, "node7", "cuda:1")


@pytest.mark.parametrize(("kind", "excluded"), [("persistent", ["node7"]), ("transient", [])])
def test_verdict_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Kind, excluded: list[str]
) -> None:
    JobHistory(tmp_path).append("submit")
    config = RunConfig(train=TrainConfig(run_dir=str(tmp_path)))
    with RunLock(tmp_path) as lock, RunRecords(config, 0, Console(quiet=True)) as records:
        verdict = Verdict(12, "gradient not finite", kind, (PLACE,))
        with caplog.at_level(logging.ERROR):
            report_verdict(verdict, GROUPS, records, lock)
    assert f"a {kind} fault on rank 3 (node7, cuda:1)" in caplog.text
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["kind"], record["event"], record["verdict"]) == ("guard", "rerun", kind)
    assert (record["ranks"], record["hosts"], record["devices"]) == ("3", "node7", "cuda:1")
    event = json.loads((tmp_path / FILE_NAME).read_text().splitlines()[-1])
    assert (event["event"], event["step"], event["verdict"]) == ("fault", 12, kind)
    assert event["places"] == [{"rank": 3, "host": "node7", "device": "cuda:1"}]
    assert JobHistory(tmp_path).current()[-1]["event"] == "fault"
    assert list(BadNodes(tmp_path, 24.0).current()) == excluded


@pytest.mark.parametrize(
    ("mode", "free", "expected"),
    [("auto", 480, True), ("auto", 479, False), (True, 1, True), (False, 10**9, False)],
)
def test_saves_are_in_the_background_where_memory_allows(
    monkeypatch: pytest.MonkeyPatch, mode: bool, free: int, expected: bool
) -> None:
    available = psutil.virtual_memory()._replace(available=free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    # Twenty parameters of twelve bytes, twice in half of the memory.
    specs = {"weight": ParameterSpec("weight", (5, 4), None, 0, 5, (5, 4))}
    config = RunConfig(checkpoint=CheckpointConfig(asynchronous=mode))
    chosen, text = choose_background_saves(config, GROUPS, specs)
    assert chosen is expected
    assert text.startswith("in the background" if expected else "while training waits")
    assert f"checkpoint.asynchronous={str(mode).lower()}" in text
