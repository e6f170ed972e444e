"""Splits of a task: their rows and micro batches, and a model's outputs and metrics for them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import CLASS_HEADS, GROUPED_HEADS, Head, RunConfig
from megatron_deberta.data import Integers
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.data.dataset.best_fit import best_fit
from megatron_deberta.distributed.control import (
    broadcast_text,
    raise_on_all_ranks,
    sum_over_batch_ranks,
)
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.selection import SCORE
from megatron_deberta.evaluate.validation import Evaluation, evaluate, never
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.model.inputs import ModelInputs, RowPacking
from megatron_deberta.objectives import build_objective
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL
from megatron_deberta.tasks.class_scores import class_scores
from megatron_deberta.tasks.encoded import EncodedDataset
from megatron_deberta.tasks.encoding import encode
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.reading import read_examples
from megatron_deberta.tasks.scoring import (
    Outputs,
    nonfinite_rows,
    predict,
    score,
    with_best_thresholds,
)
from megatron_deberta.tasks.task import DEV, EXAMPLE_HEADS, SCORE_HEADS, TRAIN, TaskConfig
from megatron_deberta.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Dropout keys per sample: more than any example's choices
_KEYS_PER_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True)
class TaskRows:
    """Encoded examples of one split, as samples: rows, or whole examples of several rows.

    Attributes:
        head: of the model.
        encoded: the examples.
        filler: tokens of a padding row.
        pad_id: token id of padding.
        multiple: N of a micro batch is a multiple of this.
        pack: the rows of a micro batch also stand side by side, see ``RowPacking``.
    """

    head: Head
    encoded: EncodedDataset
    filler: tuple[int, ...]
    pad_id: int
    multiple: int = 1
    pack: bool = False

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        is_example = self.head in EXAMPLE_HEADS
        return self.encoded.num_examples if is_example else self.encoded.num_rows

    @property
    def lengths(self) -> Integers:
        """Tokens of each sample; of the longest row where it has several."""
        lengths = self.encoded.lengths
        if self.head not in EXAMPLE_HEADS:
            return lengths
        longest: Integers = np.maximum.reduceat(lengths, self.encoded.example_offsets[:-1])
        return longest

    def batch(self, samples: Integers, indices: Integers) -> TaskBatch:
        """Build a micro batch without padding beyond its longest row.

        Args:
            samples: number of each sample in the split, -1 = padding sample.
            indices: global sample index of each, which selects dropout bits.
        """
        if self.head not in EXAMPLE_HEADS:
            rows = samples
            return self._collate(rows, indices, self._labels(rows))
        offsets = self.encoded.example_offsets
        # Ranks exchange as many texts of each sample.
        padding = int(offsets[1]) if self.head == "embed" else 1
        counts = np.where(samples < 0, padding, np.diff(offsets)[samples])
        columns = np.arange(counts.max())
        present = columns < counts[:, None]
        rows = np.where(samples[:, None] < 0, -1, offsets[samples][:, None] + columns)[present]
        choice_rows = np.full(present.shape, -1, np.int64)
        choice_rows[present] = np.arange(rows.size)
        keys = (indices[:, None] * _KEYS_PER_SAMPLE + columns)[present]
        labels = self._labels(rows if self.head == "rerank" else samples)
        return self._collate(rows, indices, labels, choice_rows, keys)

    def batches(self, micro_batch_size: int, dp_rank: int, dp_size: int) -> Iterator[TaskBatch]:
        """Yield a rank's micro batches of all samples, sorted by length.

        All ranks yield the same number of batches, as collectives require.

        Args:
            micro_batch_size: samples per forward pass.
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
        """
        order = np.argsort(self.lengths, kind="stable")
        order = np.concatenate([order, np.full(-len(order) % (micro_batch_size * dp_size), -1)])
        for samples in order.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]:
            yield self.batch(samples, samples)

    def _collate(
        self,
        rows: Integers,
        indices: Integers,
        labels: npt.NDArray[Any] | None,
        choice_rows: Integers | None = None,
        keys: Integers | None = None,
    ) -> TaskBatch:
        encoded = self.encoded
        live = rows >= 0
        sizes = np.where(live, encoded.lengths[rows], len(self.filler))
        length = -(-int(sizes.max()) // self.multiple) * self.multiple
        mask = np.arange(length) < sizes[:, None]
        source = mask & live[:, None]
        # Index of each token of the batch in the arrays of all tokens
        tokens = (encoded.row_offsets[rows][:, None] + np.arange(length))[source]
        ids = np.full(mask.shape, self.pad_id, np.int64)
        types = np.zeros(mask.shape, np.int64)
        ids[source], types[source] = encoded.input_ids[tokens], encoded.token_type_ids[tokens]
        ids[~live, : len(self.filler)] = self.filler
        if labels is None:
            labels = np.full(mask.shape, IGNORED_LABEL, np.int64)
            labels[source] = encoded.labels[tokens]
        return TaskBatch(
            ModelInputs(
                torch.from_numpy(ids),
                torch.from_numpy(mask),
                token_type_ids=torch.from_numpy(types),
            ),
            torch.from_numpy(labels),
            sample_index=torch.from_numpy(indices),
            row_index=torch.from_numpy(rows),
            choice_rows=None if choice_rows is None else torch.from_numpy(choice_rows),
            row_keys=None if keys is None else torch.from_numpy(keys),
            packing=pack_rows(sizes, length) if self.pack else None,
        )

    def _labels(self, rows: Integers) -> npt.NDArray[Any] | None:
        """Return the labels of rows, or of examples of several; None: they belong to tokens."""
        if self.head == "tokens":
            return None
        labels = np.asarray(self.encoded.labels[rows])
        if self.head in (*SCORE_HEADS, "rerank"):
            return np.where(rows < 0, np.nan, labels).astype(np.float32)
        labels = labels.astype(np.int64)
        labels[rows < 0] = IGNORED_LABEL
        return labels


def pack_rows(sizes: Integers, length: int) -> RowPacking:
    """Put the rows of a batch side by side, best fit decreasing.

    Args:
        sizes: [B] tokens of each row.
        length: N of the batch, and of the packed rows.
    """
    order = np.argsort(-sizes, kind="stable")
    bins = np.empty(sizes.size, np.int64)
    bins[order], num_bins = best_fit(sizes[order], length)
    # Rows by packed row, in ascending order
    order = np.argsort(bins, kind="stable")
    of = bins[order]
    counts = np.bincount(bins, minlength=num_bins)
    number = np.arange(sizes.size) - (counts.cumsum() - counts)[of]
    ends = sizes[order].cumsum()
    starts = ends - sizes[order]
    begins = starts - starts[counts.cumsum() - counts][of]
    index = np.full((num_bins, length), -1, np.int64)
    firsts = np.full((num_bins, int(counts.max())), -1, np.int64)
    firsts[of, number] = begins
    rows = order.repeat(sizes[order])
    place = np.arange(rows.size) - starts.repeat(sizes[order])
    index[bins[rows], begins.repeat(sizes[order]) + place] = rows * length + place
    places = np.empty(sizes.size, np.int64)
    places[order] = of * firsts.shape[1] + number
    return RowPacking(*(torch.from_numpy(array) for array in (index, firsts, places)))


@dataclass(frozen=True, slots=True)
class TaskBatchBuilder:
    """Builds micro batches as a pure function of global sample indices.

    Attributes:
        rows: the training examples.
        examples: returns the sample number of each global sample index, -1 for none.
    """

    rows: TaskRows
    examples: Callable[[Sequence[int]], Integers]

    def build(self, samples: Sequence[int]) -> TaskBatch:
        """Return the batch of the given samples, in that order."""
        numbers = self.examples(samples)
        return self.rows.batch(numbers, np.where(numbers < 0, -1, np.asarray(samples, np.int64)))


def output_shape(head: Head, encoded: EncodedDataset, num_outputs: int) -> tuple[int, ...]:
    """Return the shape of a model's outputs for all rows of a split.

    Args:
        head: of the model.
        encoded: the examples.
        num_outputs: values per row or token.
    """
    places = len(encoded.input_ids) if head in ("spans", "tokens") else encoded.num_rows
    return (places,) if head in ("regression", *GROUPED_HEADS) else (places, num_outputs)


class OutputCollector:
    """Outputs of a model's head for all rows of a split.

    Args:
        head: of the model.
        encoded: the examples.
        num_outputs: values per row or token.
        device: of the outputs.
    """

    def __init__(
        self, head: Head, encoded: EncodedDataset, num_outputs: int, device: torch.device
    ) -> None:
        """See the class."""
        self._per_token = head in ("spans", "tokens")
        self._offsets = encoded.row_offsets
        self.outputs = torch.zeros(output_shape(head, encoded, num_outputs), device=device)

    def add(self, batch: Any, outputs: Tensor) -> None:
        """Store the outputs of a micro batch.

        Args:
            batch: ``TaskBatch`` of the split.
            outputs: of the head, fp32; ``[B, N, K]`` for a head on tokens, ``[B, K]`` for one on
                rows, ``[B]`` for a score or a choice.
        """
        live = batch.row_index >= 0
        if not self._per_token:
            self.outputs[batch.row_index[live]] = outputs[live]
            return
        places = torch.from_numpy(self._offsets[batch.row_index.cpu().numpy()]).to(outputs.device)
        places = places[:, None] + torch.arange(outputs.size(1), device=outputs.device)
        real = batch.inputs.is_token & live[:, None]
        self.outputs[places[real]] = outputs[real]


@dataclass(frozen=True, slots=True)
class Split:
    """Examples of one split and their encoding."""

    examples: Sequence[Example]
    encoded: EncodedDataset


def check_task(config: RunConfig, task: TaskConfig) -> None:
    """Check that a run's model has the head and the classes of a task.

    Raises:
        ConfigError: it has not.
    """
    _check_pairs(config, task)
    labels = class_names(task)
    if (task.head, labels) != (config.model.head, config.model.labels):
        raise ConfigError(
            f"task {task.name} has the head {task.head} with labels {list(labels)}, the model "
            f"{config.model.head} with {list(config.model.labels)}; use the task that the model "
            "was fine-tuned on, or fine-tune it again"
        )


def _check_pairs(config: RunConfig, task: TaskConfig) -> None:
    """Check that pairs to embed have the scores that loss and metrics need.

    Raises:
        ConfigError: they have none.
    """
    if task.head != "embed":
        return
    needs = {DEV: "the metrics compare cosines with scores; name their column, or leave it out"}
    if config.objective.positive_similarity is None:
        needs[TRAIN] = (
            "objective.positive_similarity=null fits cosines to scores; name their column, or set "
            "a number for positives and their negatives in the batch"
        )
    for name, why in needs.items():
        if name in task.splits and "label" not in (task.splits[name].columns or task.columns):
            raise ConfigError(f"task {task.name}: splits.{name} has no columns.label, but {why}")


def class_names(task: TaskConfig) -> tuple[str, ...]:
    """Return the names of a model's classes; empty for heads without classes."""
    if task.head not in CLASS_HEADS:
        return ()
    return tuple(task.id2label.values())


def read_split(
    config: RunConfig,
    task: TaskConfig,
    name: str,
    tokenizer: Tokenizer,
    run_dir: Path | None,
) -> Split:
    """Read and encode a split; encoded examples are kept in ``finetune.cache``.

    Args:
        config: the run.
        task: its task.
        name: the split.
        tokenizer: the model's tokenizer.
        run_dir: folder of the run, which keeps them if no other is set; None: they are not kept.
    """
    examples = read_examples(task, config.finetune.data or "", name)
    cache = (
        Path(config.finetune.cache) if config.finetune.cache else run_dir and run_dir / "encoded"
    )
    length = config.data.sequence_length
    return Split(examples, encode(task, examples, tokenizer, length, cache=cache))


def task_rows(config: RunConfig, encoded: EncodedDataset, tokenizer: Tokenizer) -> TaskRows:
    """Return the training or validation samples of encoded examples.

    Args:
        config: the run.
        encoded: the examples.
        tokenizer: the model's tokenizer.
    """
    parallel = config.parallel
    return TaskRows(
        config.model.head,
        encoded,
        (tokenizer.cls_id, tokenizer.sep_id),
        tokenizer.pad_id,
        parallel.tensor_parallel_size if parallel.sequence_parallel else 1,
        config.finetune.pack_rows,
    )


def validate_split(
    module: nn.Module,
    *,
    config: RunConfig,
    task: TaskConfig,
    split: Split,
    tokenizer: Tokenizer,
    groups: ProcessGroups,
    should_abort: Callable[[], bool] = never,
) -> Evaluation | None:
    """Compute the loss and the task's metrics. Collective over all ranks.

    Metrics of multilabel tasks use the thresholds that are best on this split.

    Args:
        module: the objective's model with its loss.
        config: the run.
        task: the task.
        split: examples to score.
        tokenizer: the model's tokenizer.
        groups: the rank grid.
        should_abort: called before each batch, with the same result on every rank.

    Returns:
        The metrics, NaN if an output is not finite; None: told to stop.
    """
    found = run_split(module, config, split.encoded, tokenizer, groups, should_abort)
    if found is None:
        return None
    outputs, evaluation = found
    metrics: dict[str, float] = {}
    classes = None
    with raise_on_all_ranks(groups):
        if groups.rank == 0:
            # A run goes on: the guard may roll it back, and no such step is the best.
            if bad := nonfinite_rows(split.encoded, outputs):
                logger.warning(
                    "validation: the model's outputs are infinite or not a number in %s of %s "
                    "rows, so the metrics are not a number",
                    f"{bad:,}",
                    f"{split.encoded.num_rows:,}",
                )
                metrics = {str(name): math.nan for name in task.metrics}
            else:
                task = with_best_thresholds(task, split.examples, split.encoded, outputs)
                metrics = score(task, split.examples, split.encoded, outputs)
                predictions = predict(task, split.examples, split.encoded, outputs)
                classes = class_scores(task, split.examples, predictions)
    metrics = json.loads(broadcast_text(json.dumps(metrics), groups))
    values = {"loss": evaluation.metrics["loss"], **metrics, SCORE: metrics[task.metrics[0]]}
    shown = [f"{name.replace('_', ' ')} {values[name]:.4f}" for name in ("loss", *task.metrics)]
    return Evaluation(values, " | ".join(shown), classes)


def run_split(
    module: nn.Module,
    config: RunConfig,
    encoded: EncodedDataset,
    tokenizer: Tokenizer,
    groups: ProcessGroups,
    should_abort: Callable[[], bool] = never,
    advance: Callable[[float], None] | None = None,
) -> tuple[Outputs, Evaluation] | None:
    """Compute a model's outputs for all rows, and its loss. Collective over all ranks.

    Args:
        module: the objective's model with its loss.
        config: the run.
        encoded: the examples.
        tokenizer: the model's tokenizer.
        groups: the rank grid.
        should_abort: called before each batch, with the same result on every rank.
        advance: called after each batch with the share of all tokens that are done, about.

    Returns:
        The outputs, fp32 of the shape of `output_shape`, equal on all ranks, and the loss; None:
        told to stop.
    """
    rows = task_rows(config, encoded, tokenizer)
    collector = OutputCollector(
        config.model.head, encoded, num_outputs(config.model), groups.device
    )
    batches = rows.batches(config.train.micro_batch_size, groups.dp_rank, groups.dp_size)
    objective = build_objective(config)
    done, total = 0, max(len(encoded.input_ids), 1)

    def collect(batch: Any, outputs: Tensor) -> None:
        nonlocal done
        collector.add(batch, outputs)
        if advance is not None:
            numbers = batch.row_index[batch.row_index >= 0].cpu().numpy()
            done += int(encoded.lengths[numbers].sum()) * groups.dp_size
            advance(min(done / total, 1.0))

    evaluation = evaluate(module, batches, groups, objective, should_abort, collect)
    if evaluation is None:
        return None
    # Every row was computed by one data-parallel rank; the others hold zeros.
    outputs: Outputs = sum_over_batch_ranks(collector.outputs, groups).cpu().numpy()
    return outputs, evaluation
