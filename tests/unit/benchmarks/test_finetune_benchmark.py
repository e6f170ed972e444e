"""The fine-tuning benchmark with tiny models; transformers' Trainer itself needs accelerate."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from typing import Any

import pytest
import torch
from transformers import trainer_pt_utils

from benchmarks.step import finetune
from benchmarks.step.finetune_sides import Rows, Work, collate, train_ours, train_stock, whole_pools
from megatron_deberta.config.schema import Head, with_task_head
from tests.support.labelled import LABELS, SMALL, encoded


def work(head: Head) -> Work:
    labels = LABELS if head == "classification" else ()
    return Work(with_task_head(SMALL, head, labels), encoded(head), batch_size=8, epochs=2)


def turns(capsys: pytest.CaptureFixture[str]) -> list[dict[str, float]]:
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("ready") == 2
    # transformers' Trainer prints its own numbers as a Python dict.
    return [json.loads(line) for line in lines if line.startswith('{"')]


@pytest.mark.parametrize("head", ["classification", "spans"])
def test_both_models_have_the_same_loss(head: Head) -> None:
    assert 0 <= finetune.check(work(head)) < 1e-5


def test_every_side_trains_all_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = work("spans")
    sides: dict[str, Any] = {"ours": lambda: train_ours(job, "plain")}
    if importlib.util.find_spec("accelerate"):
        sides["random"] = lambda: train_stock(job, "random")
    for train in sides.values():
        monkeypatch.setattr(sys, "stdin", io.StringIO("go\ngo\n"))
        train()
        found = turns(capsys)
        assert [turn["tokens"] for turn in found] == [len(job.rows.input_ids)] * 2
        assert all(turn["places"] > turn["tokens"] and turn["seconds"] > 0 for turn in found)
    torch.use_deterministic_algorithms(False)


def test_rows_are_padded_to_the_longest() -> None:
    rows = Rows(work("spans").rows, "spans")
    batch = collate([rows[0], rows[1]])
    lengths = [len(row["input_ids"]) for row in (rows[0], rows[1])]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["input_ids"].shape == (2, max(lengths))
    assert batch["start_positions"].shape == (2,)


def test_length_groups_are_those_of_a_large_data_set() -> None:
    lengths = list(range(24))
    with whole_pools(work("spans")):
        order = trainer_pt_utils.get_length_grouped_indices(lengths, 8)
    # All three batches are sorted together; at most a quarter of the data set otherwise.
    assert order == sorted(lengths, reverse=True)
    assert trainer_pt_utils.get_length_grouped_indices(lengths, 8) != order
