"""Averages of the weights of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_deberta.checkpoint.layout import EMA, WEIGHT, committed_steps, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader, Slice
from megatron_deberta.errors import CheckpointError, ConfigError


class AveragedWeights:
    """Weighted mean of the weights of several checkpoints, computed in fp64.

    Args:
        readers: checkpoints of one run.
        shares: weight of each, of any positive sum.

    Attributes:
        path: folder of the last checkpoint.
        metadata: of the last checkpoint.
        shapes: logical shape by canonical name.

    Raises:
        CheckpointError: they are not of the same model.
    """

    def __init__(self, readers: Sequence[CheckpointReader], shares: Sequence[float]) -> None:
        total = sum(shares)
        self._parts = [(one, share / total) for one, share in zip(readers, shares, strict=True)]
        last = readers[-1]
        self.path, self.metadata, self.shapes = last.path, last.metadata, last.shapes
        for reader in readers:
            if reader.shapes != self.shapes:
                raise CheckpointError(f"{reader.path} and {self.path}: different models")

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints."""
        return [reader.metadata.step for reader, _ in self._parts]

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Return the mean of a parameter in fp32; arguments as in `CheckpointReader.tensor`."""
        first, *others = (
            reader.tensor(name, kind, part).to(torch.float64) * share
            for reader, share in self._parts
        )
        for other in others:
            first += other
        return first.to(torch.float32)


class MovingAverage:
    """The moving average of the weights that ``optimizer.ema_decay`` keeps, read as weights.

    Args:
        reader: a checkpoint.

    Attributes:
        path: folder of the checkpoint.
        metadata: of the checkpoint.
        shapes: logical shape by canonical name.

    Raises:
        ConfigError: it contains none.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        if EMA not in reader.kinds:
            raise ConfigError(
                f"{reader.path} contains no moving average; train with optimizer.ema_decay, or "
                "average checkpoints by --average or --ema"
            )
        self._reader = reader
        self.path, self.metadata, self.shapes = reader.path, reader.metadata, reader.shapes

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter or its average, if ``kind`` is that of weights.

        Arguments as in `CheckpointReader.tensor`.
        """
        return self._reader.tensor(name, EMA if kind == WEIGHT else kind, part)


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
    return AveragedWeights(readers, [decay**age for age in reversed(range(len(readers)))])
