"""Segment pairs with shorter rows at first: training, SIGKILL and resumption."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.formats import run_format
from tests.support.jobs import prepare
from tests.support.tiny_runs import export_run


@pytest.mark.nightly
def test_segment_pairs_learn_and_resume(tmp_path: Path) -> None:
    run = prepare(tmp_path, sentences=True)
    kill_at = random.randint(8, 50)
    print(f"SIGKILL after step {kill_at}")
    result = run_format(run, tmp_path, "segment_pair", kill_at)
    assert result["loss_last_5"] < result["loss_first_5"] - 0.5
    before, after = result["validation"]
    assert after["loss"] < before["loss"]
    assert 0 < after["next_sentence_loss"] < 1
    assert 0 <= after["next_sentence_accuracy"] <= 1
    output = export_run(tmp_path / "segment_pair-whole", tmp_path / "export")
    assert '"next_sentence_head": true' in (output / "config.json").read_text()
