"""Pairs of segments, shorter rows at first: trained, killed and resumed as whole runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from tests.faults.formats import prepare_sentences, run_format


@pytest.mark.slow
def test_segment_pairs_learn_and_resume(tmp_path: Path) -> None:
    run = prepare_sentences(tmp_path)
    kill_at = random.randint(8, 50)
    print(f"SIGKILL after step {kill_at}")
    seen = run_format(run, tmp_path, "segment_pair", kill_at)
    assert seen["loss_last_5"] < seen["loss_first_5"] - 0.5
    before, after = seen["validation"]
    assert after["loss"] < before["loss"]
    assert 0 < after["next_sentence_loss"] < 1
    assert 0 <= after["next_sentence_accuracy"] <= 1
    output = tmp_path / "export"
    checkpoint = tmp_path / "segment_pair-whole"
    arguments = ["convert", "--checkpoint", str(checkpoint), "--to", "hf", "--output", str(output)]
    assert main(arguments) == 0
    assert '"next_sentence_head": true' in (output / "config.json").read_text()
