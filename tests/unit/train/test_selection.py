"""Selection of the best checkpoint, early stop, and retention of the best step."""

from __future__ import annotations

import math
from pathlib import Path

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, find_best, record_best, step_dir
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.train.selection import Selection

SCORES = [(2, 0.5), (4, math.nan), (6, 0.7), (8, 0.7), (10, 0.6)]


def test_the_first_of_equal_scores_is_the_best() -> None:
    selection = Selection()
    worse = []
    for step, score in SCORES:
        selection.update(step, score)
        worse.append(selection.num_worse)
    assert (selection.best_step, selection.best_score) == (6, 0.7)
    assert worse == [0, 1, 0, 1, 2]


def test_a_resumed_run_continues_the_selection() -> None:
    records = [
        {"kind": "validation", "step": step, "score": None if math.isnan(score) else score}
        for step, score in SCORES
    ]
    records += [{"kind": "train", "step": 11, "score": 1.0}, {"kind": "validation", "step": 0}]
    selection = Selection.of_records(records)
    assert selection == Selection(6, 0.7, 2)
    assert selection.on_all_ranks(single_process_groups("cpu")) == selection  # type: ignore[arg-type]


def test_the_best_checkpoint_is_not_deleted() -> None:
    assert Retention(keep_last=1, best_step=6).expired([2, 6, 10, 12]) == [2, 10]
    assert Retention(keep_last=1).expired([2, 6, 12]) == [2, 6]


def test_best_is_found_only_if_committed(tmp_path: Path) -> None:
    assert find_best(tmp_path) is None
    record_best(tmp_path, 6, 0.7)
    assert find_best(tmp_path) is None
    step_dir(tmp_path, 6).mkdir(parents=True)
    (step_dir(tmp_path, 6) / COMMITTED_FILE).touch()
    assert find_best(tmp_path) == step_dir(tmp_path, 6)
