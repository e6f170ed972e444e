"""Even sample of the lines of a corpus, drawn in units on any executor, to train a vocabulary.

Each line draws a level from the seed and its place: level ``k`` or higher with probability
``2**-k``. The sample holds the lines of the lowest level that fits, in input order. It does not
depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.text.deduplicate.pipeline import Advance
from megatron_deberta.text.deduplicate.units import Record, UnitReader, plan_units
from megatron_deberta.text.deduplicate.work import (
    StageRunner,
    TaskFolder,
    Work,
    begin_work,
    make_plan,
)
from megatron_deberta.text.jobs.executors import Engine, local_engine
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.preprocess.units import UNIT_BYTES
from megatron_deberta.text.readers.records import DAMAGED, DEFAULT_ALLOW_BAD, EMPTY, ReadOptions
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer.training import split_lines

logger = logging.getLogger(__name__)

_MOST_LEVELS = 64
# Bytes of the input per byte of the sample up to which workers keep all lines.
_INPUT_PER_SAMPLE = 16
_WARNINGS = 5


@contextlib.contextmanager
def sampled_lines(
    sources: Sequence[Source],
    output: Path,
    options: ReadOptions,
    sample_bytes: int,
    *,
    workers: int = 0,
    engine: Engine | None = None,
    unit_bytes: int = UNIT_BYTES,
    advance: Advance = lambda *_: None,
) -> Iterator[list[str]]:
    """Yield the sample; units that are done stay in ``{output}.unfinished`` if the block fails.

    Args:
        sources: input files.
        output: what is made from the sample, for the name of the unfinished work.
        options: what is read of the files.
        sample_bytes: UTF-8 bytes of text; 0: all. The sample has more than about half of them if
            at least one sixteenth of the input's bytes is text.
        workers: worker processes; 0: this process.
        engine: runs the units instead, see ``remote_engine``.
        unit_bytes: size of the units.
        advance: called with (stage, tasks, done).

    Raises:
        ConfigError: ``sample_bytes`` is negative, or unfinished work of another plan exists.
        DataError: the input is damaged, over 0.1 % of the records cannot be used, the disk is
            full, or a worker died.
    """
    if sample_bytes < 0:
        raise ConfigError(f"--sample-mb {sample_bytes / 1e6:g}: must be positive, or 0 for all")
    input_bytes = sum(source.size_bytes for source in sources)
    ratio = input_bytes / (_INPUT_PER_SAMPLE * sample_bytes) if sample_bytes else 0
    parameters = {"sample": sample_bytes, "level": int(math.log2(max(ratio, 1)))}
    plan = make_plan(parameters, options, sources, plan_units(sources, unit_bytes), "none")
    folder = JobFolder(output)
    folder.remove_leftovers()
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(begin_work(folder, plan))
        count = workers if len(work.units) > 1 else 0
        used = engine or stack.enter_context(local_engine(count, start_method="spawn"))
        runner = StageRunner(work, used, advance)
        runner.run("sample", _sample_unit, len(work.units))
        runner.check()
        _refuse_bad(work)
        yield _gather(work, sample_bytes)
        folder.remove()


def _sample_unit(work: Work, task: int, folder: TaskFolder) -> None:
    """Save ``lines.txt``, ``level`` [lines] uint8, and UTF-8 bytes by level in ``info.json``."""
    draw = random.Random(task)
    least: int = work.parameters["level"]
    sizes = [0] * _MOST_LEVELS
    levels = bytearray()
    records, bad = 0, []
    with folder.open("lines.txt") as stream:
        for record in UnitReader(work.units[task], work.sources, work.options):
            records += 1
            if not isinstance(record, Record):
                source, defect = record
                hint = "; set --keys" if defect.reason == "missing key" else ""
                name = work.sources[source].name
                what = f"{name}: line {defect.line}: {defect.reason}: {defect.detail}{hint}"
                if defect.reason == DAMAGED:
                    raise DataError(what)
                if defect.reason != EMPTY:
                    bad.append(what)
                continue
            for line in split_lines(record.text):
                # 1 - random() is in (0, 1].
                level = min(int(-math.log2(1 - draw.random())), _MOST_LEVELS - 1)
                if level >= least:
                    content = line.encode()
                    stream.write(content + b"\n")
                    levels.append(level)
                    sizes[level] += len(content)
    folder.save_array("level", np.frombuffer(bytes(levels), np.uint8))
    folder.save_json(
        "info",
        {"records": records, "bad": len(bad), "messages": bad[: _WARNINGS + 1], "sizes": sizes},
    )


def _refuse_bad(work: Work) -> None:
    infos = [work.info("sample", unit) for unit in range(len(work.units))]
    messages = [message for info in infos for message in info["messages"]]
    bad, records = (sum(info[name] for info in infos) for name in ("bad", "records"))
    for message in messages[:_WARNINGS]:
        logger.warning("%s; left out", message)
    if bad > _WARNINGS:
        logger.warning("%d more records that cannot be used; left out", bad - _WARNINGS)
    if bad > records * DEFAULT_ALLOW_BAD:
        raise DataError(
            f"{bad} of {records} records cannot be used, more than {DEFAULT_ALLOW_BAD:.1%}; "
            f"the first: {messages[0]}"
        )


def _gather(work: Work, sample_bytes: int) -> list[str]:
    """Return the lines of the lowest level that fits."""
    units = range(len(work.units))
    sizes = np.sum([work.info("sample", unit)["sizes"] for unit in units], axis=0)
    left = np.cumsum(sizes[::-1])[::-1]
    level = int(np.argmax(left <= sample_bytes)) if sample_bytes and left[0] > sample_bytes else 0
    lines: list[str] = []
    for unit in units:
        levels = work.load("sample", unit, "level")
        with (work.task_folder("sample", unit) / "lines.txt").open("rb") as stream:
            kept = (line for line, of in zip(stream, levels.tolist(), strict=True) if of >= level)
            lines.extend(line[:-1].decode() for line in kept)
    return lines
