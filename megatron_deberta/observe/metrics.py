"""Files and formats of a run's metrics: JSON lines, TensorBoard events, W&B and loss curves."""

from __future__ import annotations

import errno
import io
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
from typing_extensions import Required, TypedDict

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import MAX_RECORD_BYTES, open_appending, read_regular, write_atomically
from megatron_deberta.parsing import Count, Number, Scalar, Seconds, parse_json

logger = logging.getLogger(__name__)

RecordKind = Literal[
    "train", "validation", "baseline", "minimal_pairs", "guard", "checkpoint", "local_checkpoint"
]
ID_FILE = "wandb_id"
"""In the run folder: identifier under which restarts continue the same W&B run."""
_STEP = "step"


class _Record(TypedDict, total=False):
    """A line of ``metrics.jsonl``; other keys are metrics, too."""

    step: Required[Count]
    kind: Required[RecordKind]
    loss: Number | None
    tokens_per_second: Number | None
    seconds_left: Seconds | None
    unigram_loss: Number
    event: str
    skip: str | None
    skipped: Count
    score: Number | None


FILE_NAME = "metrics.jsonl"
_NUMERIC = ("validation", "baseline", "minimal_pairs")
"""Kinds of records that have numbers only."""


class _Writer:
    """A writer whose failures are warnings, of which the first is shown."""

    target: object
    _has_warned = False

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            logger.warning("%s: %s; training goes on", self.target, error)
        self._has_warned = True


class MetricsWriter(_Writer):
    """Appends one record per call; nonfinite numbers are written as null.

    On a full disk, records are kept in memory until there is space; training goes on.

    Args:
        run_dir: run folder.
        resume_step: step of the checkpoint that the run resumes from; records of later steps are
            removed, because these steps are repeated.
        tensorboard: also write TensorBoard events.
        wandb: also sends the numbers to W&B; closed with this writer.
        check: called before each change of the file; does not return if another process now
            writes it.

    Raises:
        DataError: ``metrics.jsonl`` contains something other than records.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        resume_step: int = 0,
        tensorboard: bool = True,
        wandb: WandbWriter | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.target = self.path = folder / FILE_NAME
        self._check = check
        # A new file: what a former writer, which still has the old one open, adds to that is lost.
        _cut_after(self.path, resume_step, check)
        # Without a buffer: after a failed write, no part of a record remains to be written later.
        self._file = self.path.open("ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size
        self._pending: list[bytes] = []
        self._wandb = wandb
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def write(self, step: int, values: Mapping[str, Any], *, kind: RecordKind = "train") -> None:
        """Append a record.

        Args:
            step: completed optimizer steps.
            values: metrics by name: numbers, text or None; only numbers go to TensorBoard and W&B.
            kind: source of the metrics; ``guard`` reports skipped updates and rollbacks.

        Raises:
            DataError: `read_metrics` would refuse the record, as the next start does.
        """
        line = orjson.dumps({"step": step, "kind": kind, **values})
        _parse(line, f"{self.path}: step {step}")
        self._pending.append(line + b"\n")
        numbers = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        try:
            self._write_pending()
            if self._events is not None:
                for name, value in numbers.items():
                    self._events.add_scalar(name, value, step)
        except OSError as error:
            self._warn(error)
        if self._wandb is not None:
            self._wandb.write(step, numbers)

    def close(self) -> None:
        """Flush everything to disk and close."""
        try:
            if not self._file.closed:
                self._write_pending()
                os.fsync(self._file.fileno())
            if self._events is not None:
                self._events.close()
        except OSError as error:
            self._warn(error)
        finally:
            self._file.close()
            if self._wandb is not None:
                self._wandb.close()

    def _write_pending(self) -> None:
        """Write the records that are not in the file yet; after a failure none of them is.

        Raises:
            OSError: the disk is full.
        """
        content = b"".join(self._pending)
        self._check()
        try:
            if content and self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(content)
        self._pending = []


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a run; an incomplete last line is ignored.

    Raises:
        DataError: a line is not a record; names the line.
    """
    *lines, _incomplete = read_regular(path, MAX_RECORD_BYTES).split(b"\n")
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def _parse(line: bytes, place: str) -> dict[str, Any]:
    what, remedy = "a metrics record", "move the file away to continue"
    parse_json(line, _Record, place, what, remedy=remedy, ignore_unknown=True)
    # Metrics without a type of their own are numbers, or of the numeric guard also text.
    record = parse_json(line, dict[str, Scalar], place, what, remedy=remedy)
    for name, value in record.items():
        if isinstance(value, (str, bool)) and name != "kind" and record["kind"] in _NUMERIC:
            raise DataError(
                f"{place}: not {what} ({name}={str(value)[:60]!r} is not a number); {remedy}"
            )
    return record


def _cut_after(path: Path, step: int, check: Callable[[], None]) -> None:
    """Remove records of later steps; replaces the file atomically."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    lines = (orjson.dumps(item, option=orjson.OPT_APPEND_NEWLINE) for item in kept)
    content = b"".join(lines)
    check()
    write_atomically(path, content)


def plot_loss(
    metrics_path: str | os.PathLike[str],
    png_path: str | os.PathLike[str],
    *,
    unigram: float | None = None,
    unit: str = "nats per masked token",
) -> None:
    """Draw training and validation loss over steps.

    Args:
        metrics_path: a ``metrics.jsonl`` with losses.
        png_path: output file, written atomically.
        unigram: unigram cross-entropy of the validation targets in nats, drawn as a line.
        unit: of the losses.

    Raises:
        DataError: there is no finite loss.
    """
    from matplotlib.figure import Figure

    curves = _loss_curves(metrics_path)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for kind, points in curves.items():
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o" if kind == "validation" else "", label=kind
            )
    if unigram is not None:
        axes.axhline(unigram, color="gray", linestyle="--", label=f"unigram ({unigram:.2f})")
    axes.set(xlabel="optimizer step", ylabel=f"loss ({unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_atomically(Path(png_path), picture.getvalue())


def terminal_loss_curve(
    metrics_path: str | os.PathLike[str], *, unigram: float | None = None, width: int = 80
) -> str:
    """Draw training and validation loss over steps with characters, ``width`` columns wide.

    The arguments and errors are those of :func:`plot_loss`.
    """
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, 18)
    for kind, points in _loss_curves(metrics_path).items():
        draw, marker = (plotext.plot, "braille") if kind == "train" else (plotext.scatter, "o")
        if points:
            draw(*zip(*points, strict=True), marker=marker, label=kind)
    if unigram is not None:
        plotext.hline(unigram)
        plotext.title(f"loss in nats per masked token (line: unigram, {unigram:.2f})")
    plotext.xlabel("optimizer step")
    return str(plotext.uncolorize(plotext.build()))


def _loss_curves(metrics_path: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """Read (step, loss) of training and validation."""
    curves: dict[str, list[tuple[int, float]]] = {"train": [], "validation": []}
    for record in read_metrics(metrics_path):
        loss = record.get("loss")
        if record.get("kind") in curves and isinstance(loss, (int, float)):
            curves[record["kind"]].append((record["step"], float(loss)))
    if not any(curves.values()):
        raise DataError(f"{metrics_path}: contains no finite loss; train for a few steps first")
    return curves


class JsonLines(_Writer):
    """Appends objects to a file, each as one line and in one write.

    Args:
        path: the file, in an existing folder.
        check: called before each change; does not return if another process now writes the folder.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self.target = self.path = path
        self._check = check

    def append(self, record: Mapping[str, Any]) -> None:
        """Append an object; nonfinite numbers become null. A failure is a warning."""
        try:
            self._check()
            append_line(self.path, orjson.dumps(record))
        except OSError as error:
            self._warn(error)

    def cut_after(self, step: int) -> None:
        """Remove the objects of later steps, and damaged lines. A failure is a warning."""
        try:
            lines = read_regular(self.path, MAX_RECORD_BYTES).splitlines(keepends=True)
            kept = [line for line in lines if _step(line) <= step]
            if len(kept) < len(lines):
                self._check()
                write_atomically(self.path, b"".join(kept))
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn(error)


def append_line(path: Path, line: bytes, *, is_shared: bool = False) -> None:
    """Append a line in one write.

    Args:
        path: the file.
        line: without its end.
        is_shared: other processes append to the file as well: flush the line to the disk, and do
            not remove the beginning of one for which there is no space.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    with open_appending(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        line += b"\n"
        if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
            # A former line was cut short, by a full disk or a kill; it must not spoil this one.
            line = b"\n" + line
        if stream.write(line) != len(line):
            if not is_shared:
                os.ftruncate(stream.fileno(), size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if is_shared:
            os.fsync(stream.fileno())


def _step(line: bytes) -> float:
    """Return the step of a line; infinity: it is damaged or has none."""
    try:
        step = orjson.loads(line)["step"] if line.endswith(b"\n") else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        step = None
    return step if isinstance(step, int) else float("inf")


class WandbWriter(_Writer):
    """Sends numbers to a W&B project, or with ``WANDB_MODE=offline`` to ``wandb/`` in the folder.

    Args:
        run_dir: run folder.
        project: name of the project.
        config: shown as the run's configuration.

    Raises:
        ConfigError: the package is not installed, or W&B refuses the start, such as without login.
    """

    target = "W&B"

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"log.wandb={project} needs the package wandb, which is not installed; install it, "
                "or leave log.wandb empty"
            ) from error
        identifier = run_dir / ID_FILE
        if not identifier.exists():
            write_atomically(identifier, secrets.token_hex(8).encode())
        try:
            self._run = wandb.init(
                project=project,
                id=identifier.read_text().strip(),
                name=run_dir.name,
                dir=run_dir,
                config=dict(config),
                resume="allow",
            )
            # Not W&B's own counter, which ignores the steps that a resumed run repeats.
            self._run.define_metric("*", step_metric=_STEP)
        except Exception as error:
            # Its own exceptions and those of its service process have no common base.
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"log.wandb={project}: {reason}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers by name; a failure is a warning."""
        try:
            self._run.log({_STEP: step, **values})
        except Exception as error:
            self._warn(error)

    def close(self) -> None:
        """Send what is left; a failure is a warning."""
        try:
            self._run.finish()
        except Exception as error:
            self._warn(error)
