"""Deduplication of a corpus: its stages, resume and publication."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import fsync_path
from megatron_deberta.parsing import read_json
from megatron_deberta.text.deduplicate import candidates, compare
from megatron_deberta.text.deduplicate.output import QUARANTINE, gather_output, write_unit
from megatron_deberta.text.deduplicate.resolve import resolve
from megatron_deberta.text.deduplicate.settings import Settings
from megatron_deberta.text.deduplicate.sign import sign_unit
from megatron_deberta.text.deduplicate.units import plan_units
from megatron_deberta.text.deduplicate.work import (
    NoDocumentsError,
    StageRunner,
    Work,
    begin_work,
    make_plan,
)
from megatron_deberta.text.jobs.executors import RunOptions, local_engine
from megatron_deberta.text.jobs.folder import BusyError, JobFolder, plan_digest
from megatron_deberta.text.preprocess.units import UNIT_BYTES
from megatron_deberta.text.readers.checks import refuse_bad
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import SUMMARY, Source

Compression = Literal["none", "gz", "zst"]
_FILES = "files"
"""In the summary: size of each other file of the result."""


def deduplicate(
    sources: Sequence[Source],
    output: Path,
    settings: Settings,
    options: ReadOptions,
    *,
    run: RunOptions | None = None,
    compression: Compression = "none",
    unit_bytes: int = UNIT_BYTES,
) -> dict[str, Any]:
    """Write the input without exact and near duplicates into a new folder.

    Unfinished work is kept beside it as ``{output}.unfinished``; the same call goes on from there
    and gives the same bytes, whatever ``run`` was and is. Where the result of the same call is
    there already, nothing is done.

    Args:
        sources: input files, whose order says which of two documents is the first.
        output: folder that appears when everything is done.
        settings: what a duplicate is.
        options: what of a record is read.
        run: how it is done.
        compression: of the files of documents.
        unit_bytes: size of the pieces that the input is worked on in.

    Returns:
        The summary, as in ``summary.json``; empty if other array tasks still work.

    Raises:
        ConfigError: ``output`` exists, or unfinished work of another plan does.
        DataError: the input cannot be read or holds no document, too many records are bad, the
            disk is full, or a worker died.
    """
    plan = make_plan(
        asdict(settings), options, sources, plan_units(sources, unit_bytes), compression
    )
    refuse_inputs(output, sources)
    return fill_folder(output, plan, _run_stages, gather_output, run or RunOptions())


def refuse_inputs(output: Path, sources: Sequence[Source]) -> None:
    """Raise ConfigError if the folder to write holds an input, which replacing it would remove."""
    folder = Path(os.path.realpath(output))
    for source in sources:
        if folder in Path(os.path.realpath(source.path)).parents:
            raise ConfigError(
                f"--output {output}: holds the input {source.path}; choose another folder"
            )


def fill_folder(
    output: Path,
    plan: dict[str, Any],
    run_stages: Callable[[Work, StageRunner], None],
    gather: Callable[[Work, Path], dict[str, Any]],
    options: RunOptions,
) -> dict[str, Any]:
    """Do what a plan says, from wherever a killed run left it, and publish the result.

    Args:
        output: folder that appears when everything is done.
        plan: see ``make_plan``.
        run_stages: does all work but the last.
        gather: puts the result together in a folder and returns its summary.
        options: of the run.

    Returns:
        The summary; empty if other array tasks still work.

    Raises:
        ConfigError: ``output`` exists, or is damaged, or unfinished work of another plan exists.
        DataError: the disk is full, or what the stages raise.
    """
    folder = JobFolder(output)
    folder.remove_leftovers()
    try:
        summary = _finished(output, plan, options)
        if summary is None:
            if os.path.lexists(output) and not options.force:
                raise ConfigError(f"--output {output}: exists; choose another or add --force")
            is_shared = options.share.tasks > 1
            try:
                with contextlib.ExitStack() as stack:
                    work = stack.enter_context(begin_work(folder, plan, shared=is_shared))
                    # Spawned: numpy may have started threads.
                    engine = options.engine or stack.enter_context(
                        local_engine(options.workers, start_method="spawn")
                    )
                    runner = StageRunner(work, engine, options.advance, options.share)
                    # Another task of the array may have published since.
                    if not is_shared or _finished(output, plan, options) is None:
                        run_stages(work, runner)
                        runner.check()
                    if not is_shared:
                        return _publish(work, folder, output, gather, options.allow_bad)
                with folder.locked(seconds=0):
                    if (summary := _finished(output, plan, options)) is not None:
                        folder.remove()
                        return summary
                    return _publish(work, folder, output, gather, options.allow_bad)
            except BusyError:
                if is_shared:
                    return {}
                raise
            except NoDocumentsError:
                # Other options are wanted, which unfinished work would refuse.
                if not is_shared:
                    folder.remove()
                raise
        elif folder.path.exists():
            with folder.locked():
                folder.remove()
    except OSError as error:
        raise DataError(f"{folder.path}: {error}; is the disk full?") from error
    return summary


def _publish(
    work: Work,
    folder: JobFolder,
    output: Path,
    gather: Callable[[Work, Path], dict[str, Any]],
    allow_bad: float | None,
) -> dict[str, Any]:
    """Give the result its name; may be killed at any point and called again."""
    folder.check_lock()
    staged = work.folder / "output"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    summary = {**gather(work, staged), "plan_sha256": work.plan_sha256}
    listed = staged / QUARANTINE
    refuse_bad(summary["quarantined"], summary["documents"], allow_bad, listed)
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    summary[_FILES] = {str(path.relative_to(staged)): path.stat().st_size for path in files}
    (staged / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for path in staged.rglob("*"):
        fsync_path(path)
    fsync_path(staged)
    folder.check_lock()
    if output.exists():
        output.rename(work.folder / "replaced")
    staged.rename(output)
    fsync_path(output.parent)
    folder.remove()
    return summary


def _finished(output: Path, plan: dict[str, Any], options: RunOptions) -> dict[str, Any] | None:
    """Return the summary of a result that is there, if it is this plan's; None: do the work.

    Raises:
        ConfigError: files of it are missing or cut off, and it is not to be replaced.
    """
    try:
        summary = read_json(output / SUMMARY, dict[str, Any], "a summary", remedy="remove it")
    except (OSError, DataError):
        return None
    if summary.get("plan_sha256") != plan_digest(plan):
        return None
    # Summaries of earlier releases list no files.
    files = summary.get(_FILES)
    for name, size in files.items() if isinstance(files, dict) else ():
        path = output / name
        if path.is_file() and path.stat().st_size == size:
            continue
        if not options.force:
            raise ConfigError(
                f"{path} is missing or cut off since the result was published; remove {output}, or "
                "add --force"
            )
        return None
    return summary


def _run_stages(work: Work, runner: StageRunner) -> None:
    units = len(work.units)
    runner.run("sign", sign_unit, units)
    total = int(candidates.unit_starts(work)[-1])
    if not total:
        raise NoDocumentsError(
            f"no documents with words in {len(work.sources)} input file(s); check --input and "
            "--keys"
        )
    runner.run("exact", candidates.find_exact, candidates.num_parts(total))
    if not work.settings.exact_only:
        runner.run("mark", candidates.mark_exact, 1)
        runner.run(
            "candidates", candidates.find_candidates, compare.num_candidate_tasks(work, total)
        )
        runner.run("estimate", compare.estimate_pairs, units)
        runner.run("needed", compare.mark_needed, 1)
        runner.run("collect", compare.collect_runs, units)
        runner.run("verify", compare.verify_pairs, units)
    runner.run("resolve", resolve, 1)
    runner.run("write", write_unit, units)
