"""Selection of the best checkpoint by a validation score, and early stop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    forget_best,
    read_best,
    record_best,
    step_dir,
)
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.control import all_reduce_any, broadcast_text, raise_on_all_ranks
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import DataError
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics

SCORE = "score"
"""Metric that selects checkpoints; larger is better."""


@dataclass(slots=True)
class Selection:
    """Best saved checkpoint of a run, and its validations; the same on every rank.

    A validation selects nothing before the checkpoint of its step is committed.

    Attributes:
        best_step: step of the saved checkpoint with the best score; None: none yet.
        best_score: its score.
        top_score: best score of all validations, saved or not, for early stop.
        num_worse: validations since that one.
        unsaved: scores above ``best_score`` of steps without a committed checkpoint, by step.
        examples: fingerprint of the validation examples; empty: unknown.
    """

    best_step: int | None = None
    best_score: float = -math.inf
    top_score: float = -math.inf
    num_worse: int = 0
    unsaved: dict[int, float] = field(default_factory=dict)
    examples: str = ""

    def update(self, step: int, score: float) -> None:
        """Record the score of a validation; equal scores and NaN are not better."""
        if score > self.top_score:
            self.top_score, self.num_worse = score, 0
        else:
            self.num_worse += 1
        if score > self.best_score:
            self.unsaved[step] = score

    def is_candidate(self, step: int) -> bool:
        """Return whether a checkpoint of ``step`` would be the best, once it is saved."""
        others = (score for other, score in self.unsaved.items() if other != step)
        return step in self.unsaved and self.unsaved[step] > max(others, default=-math.inf)

    def best_after(self, step: int) -> int | None:
        """Return the step of the best checkpoint when that of ``step`` is committed, too."""
        return step if step in self.unsaved else self.best_step

    def saved(self, step: int) -> bool:
        """Record a committed checkpoint; return whether it is the best one."""
        score = self.unsaved.pop(step, None)
        if score is None:
            return False
        self.best_step, self.best_score = step, score
        self.unsaved = {other: value for other, value in self.unsaved.items() if value > score}
        return True

    def forget(self, *, before: int) -> None:
        """Forget the validations of earlier steps whose checkpoints could not be saved."""
        self.unsaved = {step: score for step, score in self.unsaved.items() if step >= before}

    @classmethod
    def of_run(
        cls, run_dir: Path, records: Sequence[Mapping[str, Any]], last: int, *, keeps_best: bool
    ) -> Selection:
        """Return the selection of a run after a step.

        ``best.json`` comes first, because the records of older validations may have been removed.
        A process that was killed after a commit may not have written it, so that committed
        checkpoints with a better validation in the records replace it.

        Args:
            run_dir: folder of the run.
            records: those of ``metrics.jsonl``.
            last: the step; later records and checkpoints belong to steps that are repeated.
            keeps_best: whether the run saves its best checkpoint; if not, none is the best.
        """
        selection = cls()
        best = read_best(run_dir) if keeps_best else None
        validations = [r for r in records if r["kind"] == "validation" and r["step"] <= last]
        scores = [(r["step"], r[SCORE]) for r in validations if SCORE in r]
        if best is not None and best["step"] <= last and _is_committed(run_dir, best["step"]):
            selection.examples = best.get("examples", "")
            if best["score"] is not None:
                selection.best_step, selection.best_score = best["step"], best["score"]
            if selection.best_step not in dict(scores):
                # The records up to that step were removed.
                selection.top_score = selection.best_score
        for step, score in scores:
            # A score that is not finite is recorded as null.
            selection.update(step, math.nan if score is None else score)
            if keeps_best and step in selection.unsaved and _is_committed(run_dir, step):
                selection.saved(step)
        selection.unsaved.clear()
        return selection

    def on_all_ranks(self, groups: ProcessGroups) -> Selection:
        """Return rank 0's selection. Collective over all ranks."""
        values = json.loads(broadcast_text(json.dumps(asdict(self)), groups))
        unsaved = {int(step): score for step, score in values.pop("unsaved").items()}
        return Selection(**values, unsaved=unsaved)


def open_selection(
    config: RunConfig, groups: ProcessGroups, run_dir: Path | None, step: int, examples: str = ""
) -> Selection:
    """Return the selection so far. Collective over all ranks of a fine-tuning run.

    Args:
        config: the run.
        groups: the rank grid.
        run_dir: folder of the run; None except on rank 0.
        step: completed steps.
        examples: fingerprint of the validation examples.

    Raises:
        DataError: the best checkpoint so far has its score on other examples.
    """
    selection = Selection()
    if not config.finetune.task:
        return selection
    with raise_on_all_ranks(groups):
        if run_dir is not None:
            records = read_metrics(run_dir / FILE_NAME)
            keeps_best = config.finetune.keep_best
            selection = Selection.of_run(run_dir, records, step, keeps_best=keeps_best)
            if selection.examples and selection.examples != examples:
                raise DataError(
                    f"{run_dir}: the best checkpoint, of step {selection.best_step}, has its score "
                    "on other validation examples; restore the files of finetune.data, or start "
                    "a new run"
                )
            selection.examples = examples
            record_selection(run_dir, selection)
    return selection.on_all_ranks(groups)


def select_committed(
    selection: Selection, step: int, groups: ProcessGroups, run_dir: Path | None
) -> None:
    """Record a validation whose checkpoint is already committed. Collective over all ranks.

    Args:
        selection: updated with the validation.
        step: step of both.
        groups: the rank grid.
        run_dir: folder of the run; None except on rank 0.
    """
    is_committed = run_dir is not None and _is_committed(run_dir, step)
    if all_reduce_any(is_committed, groups) and selection.saved(step) and run_dir is not None:
        record_selection(run_dir, selection)


def record_selection(run_dir: Path, selection: Selection) -> None:
    """Write ``best.json``, or remove that of steps that are repeated."""
    if selection.best_step is None:
        forget_best(run_dir)
    else:
        record_best(run_dir, selection.best_step, selection.best_score, selection.examples)


def _is_committed(run_dir: Path, step: int) -> bool:
    return (step_dir(run_dir, step) / COMMITTED_FILE).exists()
