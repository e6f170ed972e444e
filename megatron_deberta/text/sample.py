"""Even sample of the lines of a corpus, drawn in units on any executor, to train a vocabulary.

Each line draws a level from the seed and its place: level ``k`` or higher with probability
``2**-k``. The sample holds the lines of the lowest level that fits, in input order.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_deberta.errors import ConfigError, MegatronDebertaError
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.jobs.stages import (
    QUARANTINE,
    StageRunner,
    TaskFolder,
    Work,
    begin_work,
    check_again,
    concatenate,
    make_plan,
)
from megatron_deberta.text.jobs.units import UNIT_BYTES
from megatron_deberta.text.readers.checks import refuse_bad
from megatron_deberta.text.readers.records import EMPTY, ReadOptions
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer.training import split_lines

logger = logging.getLogger(__name__)

_MOST_LEVELS = 64
# Bytes of the input per byte of the sample up to which workers keep all lines.
INPUT_PER_SAMPLE = 16


@contextlib.contextmanager
def sampled_lines(
    sources: Sequence[Source],
    output: Path,
    options: ReadOptions,
    sample_bytes: int,
    *,
    run: RunOptions | None = None,
    unit_bytes: int = UNIT_BYTES,
    check: Callable[[], None] = lambda: None,
) -> Iterator[list[str]]:
    """Yield the sample; units that are done stay in ``{output}.unfinished`` if the block fails.

    Where it fails with an error of ours, a sample with other arguments replaces them.

    Args:
        sources: input files.
        output: what is made from the sample, for the name of the unfinished work.
        options: what is read of the files.
        sample_bytes: UTF-8 bytes of text; 0: all. The sample has more than about half of them if
            at least one sixteenth of the input's bytes is text.
        run: how it is done.
        unit_bytes: size of the units.
        check: called when the folder is this process's; raises ConfigError if ``output`` cannot be
            made any more, as when another process has made it meanwhile.

    Raises:
        ConfigError: ``sample_bytes`` is negative, ``check`` raises it, or unfinished work of
            another plan exists.
        DataError: too many records are bad, the disk is full, or a worker died.
    """
    run = run or RunOptions()
    if sample_bytes < 0:
        raise ConfigError(f"--sample-mb {sample_bytes / 1e6:g}: must be positive, or 0 for all")
    input_bytes = sum(source.size_bytes for source in sources)
    ratio = input_bytes / (INPUT_PER_SAMPLE * sample_bytes) if sample_bytes else 0
    parameters = {"sample": sample_bytes, "level": int(math.log2(max(ratio, 1)))}
    plan = make_plan(parameters, options, sources, unit_bytes)
    folder = JobFolder(output)
    folder.remove_leftovers()
    check_again(folder, plan)
    with folder.locked():
        work = begin_work(folder, plan)
        try:
            check()
        except ConfigError:
            folder.remove()
            raise
        run = run if len(work.units) > 1 else replace(run, workers=0)
        try:
            with run.open_engine("spawn") as engine:
                runner = StageRunner(work, engine, run.advance)
                runner.run("sample", _sample_unit, len(work.units))
                runner.check()
            _refuse_bad(work, run.allow_bad)
            yield _gather(work, sample_bytes)
        except MegatronDebertaError:
            # The corrected command may read other files, or the same ones otherwise.
            folder.mark_failed()
            raise
        folder.remove()


def _sample_unit(work: Work, task: int, folder: TaskFolder) -> None:
    """Save ``lines.txt``, ``level`` [lines] uint8, and UTF-8 bytes by level in ``info.json``."""
    draw = random.Random(task)
    least: int = work.parameters["level"]
    sizes = [0] * _MOST_LEVELS
    levels = bytearray()
    with folder.open("lines.txt") as stream, folder.open(QUARANTINE) as quarantine:
        reader = work.read(task, folder, quarantine)
        for record in reader:
            for line in split_lines(record.text):
                # 1 - random() is in (0, 1].
                level = min(int(-math.log2(1 - draw.random())), _MOST_LEVELS - 1)
                if level >= least:
                    content = line.encode()
                    stream.write(content + b"\n")
                    levels.append(level)
                    sizes[level] += len(content)
    folder.save_array("level", np.frombuffer(bytes(levels), np.uint8))
    records = reader.counts["documents"] + reader.counts["quarantined"]
    folder.save_json("info", {"records": records, "quarantined": reader.reasons, "sizes": sizes})


def _refuse_bad(work: Work, allow_bad: float | None) -> None:
    infos = [work.info("sample", unit) for unit in range(len(work.units))]
    quarantined = sum((Counter(info["quarantined"]) for info in infos), Counter())
    concatenate(work, "sample", QUARANTINE, work.folder)
    listed = work.folder / QUARANTINE
    refuse_bad(quarantined, sum(info["records"] for info in infos), allow_bad, listed)
    if bad := sum(count for reason, count in quarantined.items() if reason != EMPTY):
        logger.warning("%d records cannot be used and are left out; the first:", bad)
        with listed.open(encoding="utf-8") as stream:
            logger.warning("%s", next(line for line in stream if f'"{EMPTY}"' not in line).strip())


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
