"""Selection of the best checkpoint, early stop, and retention of the best step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_deberta.checkpoint.layout import (
    BEST_FILE,
    COMMITTED_FILE,
    find_best,
    read_best,
    record_best,
    step_dir,
)
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.config.schema import FinetuneConfig, RunConfig
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.errors import DataError
from megatron_deberta.evaluate.selection import Selection, open_selection, record_selection

Records = list[dict[str, object]]
GROUPS = single_process_groups(torch.device("cpu"))
SCORES = [(2, 0.5), (4, math.nan), (6, 0.7), (8, 0.7), (10, 0.6)]


def commit(run_dir: Path, *steps: int) -> None:
    for step in steps:
        step_dir(run_dir, step).mkdir(parents=True)
        (step_dir(run_dir, step) / COMMITTED_FILE).touch()


def validations(scores: list[tuple[int, float]]) -> Records:
    return [
        {"kind": "validation", "step": step, "score": None if math.isnan(score) else score}
        for step, score in scores
    ]


def test_the_first_of_equal_scores_is_the_best() -> None:
    selection = Selection()
    worse, saved = [], []
    for step, score in SCORES:
        selection.update(step, score)
        worse.append(selection.num_worse)
        if selection.is_candidate(step):
            assert selection.best_after(step) == step
            assert selection.saved(step)
            saved.append(step)
    assert (selection.best_step, selection.best_score) == (6, 0.7)
    assert (worse, saved) == ([0, 1, 0, 1, 2], [2, 6])


def test_only_a_saved_checkpoint_is_the_best() -> None:
    selection = Selection()
    for step, score in ((2, 0.5), (4, 0.9)):
        selection.update(step, score)
        assert selection.is_candidate(step)
        if step == 2:
            selection.saved(step)
    # The save of step 4 fails: step 2 stays the best, and must not be deleted.
    assert selection.best_after(3) == 2
    selection.forget(before=5)
    assert (selection.best_step, selection.best_score, selection.num_worse) == (2, 0.5, 0)
    # Better than all that is saved, but not than all validations.
    selection.update(6, 0.7)
    assert selection.is_candidate(6)
    assert selection.saved(6)
    assert (selection.best_step, selection.num_worse) == (6, 1)


def test_a_save_in_flight_competes() -> None:
    selection = Selection()
    selection.update(2, 0.9)
    selection.update(4, 0.8)
    assert not selection.is_candidate(4)
    selection.forget(before=4)
    assert selection.is_candidate(4)
    selection.update(6, 0.95)
    # Step 4 was saved in the background; step 6 is better and not yet saved.
    assert selection.saved(4)
    assert (selection.best_step, selection.is_candidate(6)) == (4, True)
    assert not selection.saved(5)


def test_a_resumed_run_continues_the_selection(tmp_path: Path) -> None:
    records = validations(SCORES)
    records += [{"kind": "train", "step": 11, "score": 1.0}, {"kind": "validation", "step": 0}]
    commit(tmp_path, 6, 10)
    # A killed process has committed step 6 and has not recorded it as the best.
    record_best(tmp_path, 2, 0.5)
    selection = Selection.of_run(tmp_path, records, 10, keeps_best=True)
    assert selection == Selection(6, 0.7, 0.7, 2)
    assert selection.on_all_ranks(GROUPS) == selection
    # Later steps are repeated.
    assert Selection.of_run(tmp_path, records, 5, keeps_best=True) == Selection(
        None, -math.inf, 0.5, 1
    )


def test_the_recorded_best_outlives_the_metrics(tmp_path: Path) -> None:
    commit(tmp_path, 6, 10)
    record_best(tmp_path, 6, 0.7)
    assert Selection.of_run(tmp_path, [], 10, keeps_best=True) == Selection(6, 0.7, 0.7, 0)
    records = validations([(10, 0.6)])
    selection = Selection.of_run(tmp_path, records, 10, keeps_best=True)
    assert selection == Selection(6, 0.7, 0.7, 1)
    record_selection(tmp_path, selection)
    assert read_best(tmp_path) == {"step": 6, "score": 0.7}


def test_scores_on_other_examples_do_not_compete(tmp_path: Path) -> None:
    config = replace(RunConfig(), finetune=FinetuneConfig(task="sst2"))
    commit(tmp_path, 6)
    (tmp_path / "metrics.jsonl").write_text('{"kind":"validation","step":6,"score":0.7}\n')
    assert open_selection(config, GROUPS, tmp_path, 6, "aa").best_step == 6
    assert read_best(tmp_path) == {"step": 6, "score": 0.7, "examples": "aa"}
    assert open_selection(config, GROUPS, tmp_path, 6, "aa").best_step == 6
    with pytest.raises(DataError, match="of step 6, has its score on other validation examples"):
        open_selection(config, GROUPS, tmp_path, 6, "bb")
    # A record of an older release does not name them.
    record_best(tmp_path, 6, 0.7)
    assert open_selection(config, GROUPS, tmp_path, 6, "bb").best_step == 6


@pytest.mark.parametrize("keeps_best", [True, False])
def test_a_best_validation_without_a_checkpoint_selects_nothing(
    tmp_path: Path, *, keeps_best: bool
) -> None:
    commit(tmp_path, 10)
    record_best(tmp_path, 6, 0.7)
    records = validations(SCORES[:-1])
    selection = Selection.of_run(tmp_path, records, 10, keeps_best=keeps_best)
    assert selection == Selection(None, -math.inf, 0.7, 1)
    record_selection(tmp_path, selection)
    assert not (tmp_path / BEST_FILE).exists()


def test_the_best_checkpoint_is_not_deleted() -> None:
    assert Retention(keep_last=1, best_step=6).expired([2, 6, 10, 12]) == [2, 10]
    assert Retention(keep_last=1).expired([2, 6, 12]) == [2, 6]


def test_best_is_found_only_if_committed(tmp_path: Path) -> None:
    assert find_best(tmp_path) is None
    record_best(tmp_path, 6, 0.7)
    assert find_best(tmp_path) is None
    commit(tmp_path, 6)
    assert find_best(tmp_path) == step_dir(tmp_path, 6)
