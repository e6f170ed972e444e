"""The recorded unigram baseline."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_deberta.config.schema import LogConfig, RunConfig, TrainConfig
from megatron_deberta.observe.metrics import read_metrics
from megatron_deberta.train import records


def test_only_another_validation_set_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loss = 6.5673
    # With another micro batch size, the same losses are added in another order.
    sums = iter([loss, math.nextafter(loss, 7), loss, loss + 1e-4])
    monkeypatch.setattr(records, "validation_loader", lambda *_: [])
    monkeypatch.setattr(records, "unigram_log_probabilities", lambda *_: None)
    monkeypatch.setattr(records, "unigram_cross_entropy", lambda *_: (next(sums), 1))
    config = RunConfig(train=TrainConfig(run_dir=str(tmp_path)), log=LogConfig(tensorboard=False))
    anything: Any = type("Anything", (), {"train": (), "weights": (), "size": 9})
    warnings = []
    for _ in range(4):
        with records.RunRecords(config, 0, Console(file=io.StringIO())) as run:
            run.measure_unigram(anything, anything)
        warnings.append(len(caplog.records))
    assert warnings == [0, 0, 0, 1]
    recorded = [record["unigram_loss"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert recorded == [loss, loss + 1e-4]
