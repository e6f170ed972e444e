"""Ensembles of fine-tuned runs: the best on dev, mean of their probabilities.

Source: RoBERTa (arXiv:1907.11692, section 5.1) ensembles 5 to 7 of several runs per task; the
predictions are the mean probabilities, or for STS-B the mean scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_deberta.errors import ConfigError
from megatron_deberta.finetune.data import DEV, Split
from megatron_deberta.finetune.outputs import FinetunedRun, read_outputs
from megatron_deberta.tasks.encoded import EncodedDataset
from megatron_deberta.tasks.scoring import Outputs, score
from megatron_deberta.tasks.task import Head, TaskConfig

_LEAST = 1e-30
"""Smaller probabilities count as this in logarithms."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Runs whose predictions are averaged.

    Attributes:
        task: the task.
        scores: score on dev of every candidate, best first, with its run.
        members: the best runs.
        metrics: metrics of the ensemble on dev.
        data: folder of the task's files; empty: those of the runs.
    """

    task: TaskConfig
    scores: tuple[tuple[float, FinetunedRun], ...]
    members: tuple[FinetunedRun, ...]
    metrics: dict[str, float]
    data: str

    def outputs(self, split: str) -> tuple[Split, Outputs]:
        """Return a split, and the ensemble's outputs for it."""
        return combined_outputs(self.task, self.members, split, self.data)


def build_ensemble(
    task: TaskConfig, runs: Sequence[FinetunedRun], best: int, data: str = ""
) -> Ensemble:
    """Select the best runs on dev; of equal ones, the first.

    Args:
        task: the runs' task.
        runs: the candidates.
        best: number of members.
        data: folder of the task's files; empty: those of the runs.

    Raises:
        ConfigError: there are fewer runs.
    """
    if best > len(runs):
        raise ConfigError(f"--best {best}: there are only {len(runs)} runs; lower it, or add runs")
    metric = task.metrics[0]
    scored = []
    for run in runs:
        found = read_outputs(run, DEV, data)
        value = score(task, found.split.examples, found.split.encoded, found.outputs)[metric]
        scored.append((value, run))
    scored.sort(key=lambda pair: -pair[0])
    members = tuple(run for _, run in scored[:best])
    split, outputs = combined_outputs(task, members, DEV, data)
    metrics = score(task, split.examples, split.encoded, outputs)
    return Ensemble(task, tuple(scored), members, metrics, data)


def combined_outputs(
    task: TaskConfig, members: Sequence[FinetunedRun], split: str, data: str
) -> tuple[Split, Outputs]:
    """Return a split and the mean outputs of several runs for it.

    Args:
        task: the task.
        members: the runs.
        split: name of the split.
        data: folder of the data.

    Raises:
        ConfigError: the runs encode the examples differently.
    """
    found = [read_outputs(run, split, data) for run in members]
    first = found[0].split
    for run, other in zip(members, found, strict=True):
        if other.split.encoded.fingerprint != first.encoded.fingerprint:
            raise ConfigError(
                f"{run.folder} and {members[0].folder} have different tokenizers, lengths or "
                "examples; give runs with the same"
            )
    return first, mean_outputs(task.head, first.encoded, [each.outputs for each in found])


def mean_outputs(head: Head, encoded: EncodedDataset, outputs: Sequence[Outputs]) -> Outputs:
    """Return the logarithms of mean probabilities, or mean scores in regression.

    The probabilities of spans are those of start and end over all windows of an example, so that
    differences between windows count.

    Args:
        head: of the models.
        encoded: the examples.
        outputs: of each model; see ``tasks.scoring.predict``.
    """
    if head == "regression":
        mean: Outputs = np.stack(outputs).mean(axis=0).astype(np.float32)
        return mean
    members = [_probabilities(head, encoded, values) for values in outputs]
    logarithms = np.log(np.maximum(np.mean(members, axis=0), _LEAST))
    combined: Outputs = logarithms.astype(np.float32)
    return combined


def _probabilities(
    head: Head, encoded: EncodedDataset, outputs: Outputs
) -> npt.NDArray[np.float64]:
    """Return probabilities of classes; of an example's choices; of its start and end tokens."""
    logits = outputs.astype(np.float64)
    if head in ("classification", "tokens"):
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found: npt.NDArray[np.float64] = shifted / shifted.sum(axis=-1, keepdims=True)
        return found
    borders = encoded.example_offsets
    if head == "spans":
        borders = encoded.row_offsets[borders]
    sizes = np.diff(borders)
    shifted = np.exp(logits - np.repeat(np.maximum.reduceat(logits, borders[:-1]), sizes, axis=0))
    total = np.repeat(np.add.reduceat(shifted, borders[:-1]), sizes, axis=0)
    normalised: npt.NDArray[np.float64] = shifted / total
    return normalised
