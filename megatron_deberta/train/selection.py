"""Selection of the best checkpoint by a validation score, and early stop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, record_best, step_dir
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.control import broadcast_text
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics

SCORE = "score"
"""Metric that selects checkpoints; larger is better."""


@dataclass(slots=True)
class Selection:
    """Best validation of a run; the same on every rank.

    Attributes:
        best_step: step of the best validation; None: no validation yet.
        best_score: its score.
        num_worse: validations since then.
    """

    best_step: int | None = None
    best_score: float = -math.inf
    num_worse: int = 0

    def update(self, step: int, score: float) -> None:
        """Take a validation into account; equal scores and NaN are not better."""
        if score > self.best_score:
            self.best_step, self.best_score, self.num_worse = step, score, 0
        else:
            self.num_worse += 1

    @staticmethod
    def of_records(records: Sequence[Mapping[str, Any]]) -> Selection:
        """Return the selection after the validations in ``metrics.jsonl``."""
        selection = Selection()
        for record in records:
            if record["kind"] == "validation" and SCORE in record:
                value = record[SCORE]
                # A score that is not finite is recorded as null.
                selection.update(record["step"], math.nan if value is None else value)
        return selection

    def on_all_ranks(self, groups: ProcessGroups) -> Selection:
        """Return rank 0's selection. Collective over all ranks."""
        return Selection(**json.loads(broadcast_text(json.dumps(asdict(self)), groups)))


def open_selection(config: RunConfig, groups: ProcessGroups, run_dir: Path | None) -> Selection:
    """Return the best validation so far. Collective over all ranks of a fine-tuning run.

    Args:
        config: the run.
        groups: the rank grid.
        run_dir: folder of the run; None except on rank 0.
    """
    selection = Selection()
    if not config.finetune.task:
        return selection
    if run_dir is not None:
        selection = Selection.of_records(read_metrics(run_dir / FILE_NAME))
        best = selection.best_step
        if best is not None and (step_dir(run_dir, best) / COMMITTED_FILE).exists():
            # A killed process may not have recorded it.
            record_best(run_dir, best, selection.best_score)
    return selection.on_all_ranks(groups)
