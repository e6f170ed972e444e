"""Views of a checkpoint's weights: averages, one model of two, longer tables, another head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_deberta.checkpoint.layout import EMA, WEIGHT, committed_steps, step_dir
from megatron_deberta.checkpoint.reader import (
    CheckpointReader,
    RunView,
    Slice,
    StoredRun,
    WeightSource,
    WeightView,
)
from megatron_deberta.config.schema import SINGLE_OUTPUT_HEADS, ModelConfig
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.model.low_rank import FIRST, SECOND, is_adapter
from megatron_deberta.model.replaced_tokens import (
    DELTA,
    DISCRIMINATOR,
    GENERATOR,
    TOKENS,
    discriminator_config,
    generator_config,
)
from megatron_deberta.model.task_models import parameter_shapes

POSITION_TABLES = ("embeddings.position.weight", "mask_decoder.position.weight")
"""Tables with a row per absolute position; those of relative positions do not grow."""
_CLASSIFIER = ("classifier.weight", "classifier.bias")
_OUTPUTS = (*_CLASSIFIER, "qa_outputs.weight", "qa_outputs.bias")
"""Parameters whose rows are the outputs of a head."""
_SAME_WEIGHTS = ({*SINGLE_OUTPUT_HEADS}, {"classification", "multilabel"})
"""Heads with the same parameters, which differ in what the outputs mean."""

Part: TypeAlias = Literal["generator", "discriminator"]
Rule: TypeAlias = Literal["repeat", "interpolate"]


class AveragedWeights(RunView):
    """Weighted mean of the weights of several checkpoints, computed in fp64.

    Path and metadata are those of the last one.

    Args:
        readers: checkpoints of one run.
        shares: weight of each, of any positive sum.

    Attributes:
        steps: of the checkpoints.

    Raises:
        CheckpointError: they are not of the same model.
    """

    def __init__(self, readers: Sequence[StoredRun], shares: Sequence[float]) -> None:
        super().__init__(readers[-1])
        total = sum(shares)
        self._averaged = [(one, share / total) for one, share in zip(readers, shares, strict=True)]
        self.steps = [reader.metadata.step for reader in readers]
        for reader in readers:
            if reader.shapes != self.shapes:
                raise CheckpointError(f"{reader.path} and {self.path}: different models")

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Return the mean of a parameter in fp32; arguments as in `CheckpointReader.tensor`."""
        first, *others = (
            reader.tensor(name, kind, part).to(torch.float64) * share
            for reader, share in self._averaged
        )
        for other in others:
            first += other
        return first.to(torch.float32)


class MovingAverage(RunView):
    """The moving average of the weights that ``optimizer.ema_decay`` keeps, read as weights.

    Args:
        reader: a checkpoint.

    Raises:
        ConfigError: it contains none.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__(reader)
        if EMA not in reader.kinds:
            raise ConfigError(
                f"{reader.path} contains no moving average; train with optimizer.ema_decay, or "
                "average checkpoints by --average or --ema"
            )

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter or its average, if ``kind`` is that of weights.

        Arguments as in `CheckpointReader.tensor`.
        """
        return super().tensor(name, EMA if kind == WEIGHT else kind, part)


def average_checkpoints(run_dir: Path, count: int, decay: float) -> AveragedWeights:
    """Open and verify the checkpoints of a run that are averaged.

    Args:
        run_dir: the run folder.
        count: number of newest checkpoints; 0: all that the run has kept.
        decay: weight of a checkpoint relative to the next one; 1: the plain mean.

    Raises:
        CheckpointError: a checkpoint is damaged.
        ConfigError: the run has fewer checkpoints, or ``count`` or ``decay`` is out of range.
    """
    if count < 0 or not 0 < decay <= 1:
        raise ConfigError(f"--average {count} --ema {decay:g}: use 1 or more, and above 0 up to 1")
    steps = committed_steps(run_dir)
    if not steps:
        raise ConfigError(
            f"{run_dir} is no run with checkpoints; an average needs the run's folder, as in "
            "--checkpoint runs/base"
        )
    if len(steps) < count:
        raise ConfigError(
            f"{run_dir} has {len(steps)} checkpoints, not {count}; raise "
            "checkpoint.keep_last in the next run, or average fewer"
        )
    readers = [CheckpointReader(step_dir(run_dir, step)) for step in steps[-count:]]
    for reader in readers:
        reader.verify()
    # The mean of products is not the product of means.
    merged = [with_merged_adapters(reader) for reader in readers]
    return AveragedWeights(merged, [decay**age for age in reversed(range(len(readers)))])


class ModelPart(WeightView):
    """Weights of the generator or the discriminator, with the names of a single model.

    The discriminator's token embeddings are the sum that it uses: the generator's table plus delta.

    Args:
        reader: checkpoint of a model with ``head: rtd``.
        model: its architecture.
        part: which model.

    Attributes:
        config: architecture of the part.
    """

    def __init__(self, reader: WeightSource, model: ModelConfig, part: Part) -> None:
        super().__init__(reader)
        self._is_generator = part == "generator"
        self.config = (generator_config if self._is_generator else discriminator_config)(model)
        self.shapes = parameter_shapes(self.config)

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a weight; arguments as in `CheckpointReader.tensor`.

        Raises:
            CheckpointError: there is no such parameter, or a file is damaged.
        """
        if kind != WEIGHT:
            raise CheckpointError(f"{self.path}: a part of it has weights only, no {kind}")
        prefix, stored = GENERATOR if self._is_generator else DISCRIMINATOR, self._source.shapes
        if self._is_generator or name != TOKENS or DISCRIMINATOR + TOKENS in stored:
            return super().tensor(prefix + name, kind, part)
        table = super().tensor(GENERATOR + TOKENS, kind, part)
        if DISCRIMINATOR + DELTA in stored:
            table += super().tensor(DISCRIMINATOR + DELTA, kind, part)
        return table


class MergedAdapters(RunView):
    """Weights of a checkpoint with low-rank adapters, each added to the weight of its layer.

    Args:
        source: the checkpoint.
    """

    def __init__(self, source: StoredRun) -> None:
        super().__init__(source)
        self.shapes = {name: s for name, s in source.shapes.items() if not is_adapter(name)}
        finetune = source.metadata.config["finetune"]
        self._scale = finetune["lora_alpha"] / finetune["lora_rank"]

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter; arguments as in `CheckpointReader.tensor`."""
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or kind != WEIGHT or layer + FIRST not in self._source.shapes:
            return super().tensor(name, kind, part)
        first, second = (super(MergedAdapters, self).tensor(layer + end) for end in (FIRST, SECOND))
        merged = super().tensor(name).double() + self._scale * (second.double() @ first.double())
        merged = merged.float()
        return merged if part is None else part.of(merged)


def with_merged_adapters(reader: StoredRun) -> StoredRun:
    """Return the weights of a checkpoint; low-rank adapters are added to their layers' weights."""
    return MergedAdapters(reader) if any(map(is_adapter, reader.shapes)) else reader


def open_part(
    reader: StoredRun, model: ModelConfig, part: Part
) -> tuple[ModelConfig, WeightSource]:
    """Return architecture and weights of a part; of the model itself if it has no parts.

    Low-rank adapters are merged into the weights.

    Args:
        reader: the checkpoint.
        model: its architecture.
        part: which model of replaced-token detection.
    """
    if model.head != "rtd":
        return model, with_merged_adapters(reader)
    chosen = ModelPart(reader, model, part)
    return chosen.config, chosen


class ExtendedPositions(RunView):
    """Weights of a checkpoint with longer position tables, for a new run.

    Args:
        reader: the checkpoint.
        rows: new number of positions.
        rule: as for ``extend_table``.
    """

    def __init__(self, reader: StoredRun, rows: int, rule: Rule) -> None:
        super().__init__(reader)
        self._rows = rows
        self._rule: Rule = rule
        self.shapes = {
            name: (rows, *shape[1:]) if name.endswith(POSITION_TABLES) else shape
            for name, shape in reader.shapes.items()
        }

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter in fp32; arguments as in `CheckpointReader.tensor`."""
        if not name.endswith(POSITION_TABLES):
            return super().tensor(name, kind, part)
        table = extend_table(super().tensor(name, kind), self._rows, self._rule)
        return table if part is None else part.of(table)


def extend_table(table: Tensor, rows: int, rule: Rule) -> Tensor:
    """Return a position table with more rows.

    Args:
        table: fp32 ``[P, D]``.
        rows: new number of rows, at least P.
        rule: ``repeat``: row i is row i mod P (Beltagy et al. 2020, Longformer, arXiv:2004.05150,
            section 5); ``interpolate``: linear interpolation between the first and the last row.
    """
    if rule == "repeat":
        return table[torch.arange(rows) % table.shape[0]]
    columns = F.interpolate(table.T[None], size=rows, mode="linear", align_corners=True)
    return columns[0].T.contiguous()


class TaskHead(WeightView):
    """Weights of a model whose outputs are those of another list of classes.

    Rows of the last projection are permuted by the names of the classes. The projection is left
    out, so that it starts anew, if the classes are not the same or the head is of another kind.

    Args:
        source: the weights.
        own: their architecture, with the model's own head and classes.
        wanted: the architecture to load.

    Attributes:
        order: index of each class in the weights; None: there are no rows to permute.
        why_new: why the last projection is left out; empty: it is not.
    """

    def __init__(self, source: WeightSource, own: ModelConfig, wanted: ModelConfig) -> None:
        super().__init__(source)
        self.order: list[int] | None = None
        self.why_new = ""
        heads = {own.head, wanted.head}
        if len(heads) == 2 and not any(heads <= same for same in _SAME_WEIGHTS):
            self.why_new = f"{self.path} has the head {own.head}, not {wanted.head}"
        elif own.labels != wanted.labels:
            self.order = class_order(own.labels, wanted.labels)
            if self.order is None:
                self.why_new = (
                    f"{self.path} has the classes {_shown(own.labels)}, not {_shown(wanted.labels)}"
                )
        left_out = _OUTPUTS if self.why_new else ()
        self.shapes = {name: s for name, s in source.shapes.items() if name not in left_out}
        self._labels = wanted.labels

    def describe(self, new: Sequence[str]) -> str:
        """Return what becomes of the head, for the log.

        Args:
            new: names of the parameters that start from new weights.
        """
        if new:
            why = f" ({self.why_new})" if self.why_new else ""
            return f"the head starts from new weights: {', '.join(new)}{why}"
        if self.why_new:
            return "the head has no weights of its own"
        if self.order is not None:
            return (
                "the head is taken over, its rows permuted to the order of the task's classes: "
                f"{_shown(self._labels)}"
            )
        return "the head is taken over unchanged"

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter; arguments as in `CheckpointReader.tensor`."""
        if self.order is None or name not in _CLASSIFIER:
            return super().tensor(name, kind, part)
        tensor = super().tensor(name, kind)[self.order]
        return tensor if part is None else part.of(tensor)


def class_order(own: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    """Return the index in ``own`` of each wanted class; None: the names are not the same.

    Upper and lower case are the same if no two names then are.
    """
    for key in (str, str.casefold):
        names = {key(name): index for index, name in enumerate(own)}
        order = [names.get(key(name), -1) for name in wanted]
        if len(names) == len(own) and sorted(order) == list(range(len(own))):
            return order
    return None


def are_placeholders(labels: Sequence[str]) -> bool:
    """Return whether classes have transformers' default names, which say nothing."""
    return list(labels) == [f"LABEL_{number}" for number in range(len(labels))]


def _shown(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:8])
    return f"{shown}, ... ({len(labels)})" if len(labels) > 8 else shown
