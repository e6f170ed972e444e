"""Search hyper-parameters of a task: a fine-tuning run per cell of a grid and per seed.

SEARCH.yaml has task, model, data, grid and seeds; arguments replace its keys. Finished runs are
never run again, and a killed one resumes: start the same command again. The table has median, mean,
minimum and maximum over the seeds of each cell on the split for validation. Ctrl-C saves
checkpoints and ends; a second one ends at once. See docs/search.md.

Examples:
  megatron-deberta search search.yaml --dry-run
  megatron-deberta search configs/searches/paper_base.yaml task=sst2 model=exports/base data=SST-2
  megatron-deberta search search.yaml --cluster dgx2 --jobs 8
  megatron-deberta search search.yaml --table
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_deberta.cli.arguments import add_shared, number
from megatron_deberta.cli.submit import check_fit, submission_problem
from megatron_deberta.cluster.profile import load_profile
from megatron_deberta.cluster.slurm.submit import describe_arrays, profile_of_ranks, submit_arrays
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_USAGE,
    ConfigError,
    printable,
    refusals,
)
from megatron_deberta.files import FileLock
from megatron_deberta.finetune.search import SearchConfig, load_search
from megatron_deberta.tasks.task import load_task

if TYPE_CHECKING:
    from megatron_deberta.finetune.local_runs import Outcome
    from megatron_deberta.finetune.search import ConfiguredRun, SearchRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "search", metavar="SEARCH.yaml",
        help="search; packaged ones are called configs/searches/NAME.yaml",
    )  # fmt: skip
    add_shared(
        parser, "overrides", metavar="key=value",
        help="replaces a key of the search (seeds=3), or of its grid "
        "(optimizer.learning_rate=[1e-5,2e-5], finetune.epochs=3)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=number(int, 1), metavar="N",
        help="runs at a time (default: as many as the GPUs, or the cores and the memory, allow; "
        "with --cluster: no limit)",
    )  # fmt: skip
    add_shared(
        parser, "--cluster", default="",
        help="submit the runs as a SLURM job array: dgx2, dgx_h100, local, or a YAML file",
    )  # fmt: skip
    add_shared(parser, "--trust-profile", "--no-check")
    parser.add_argument("--table", action="store_true", help="print the table, and exit")
    add_shared(parser, "--dry-run", help="print the cells, and the command of --cluster")
    parser.add_argument(
        "--prune", action="store_true",
        help="delete the checkpoints of complete cells other than the best; results remain",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run, submit, or show the search."""
    from megatron_deberta.evaluate.models import open_source_model
    from megatron_deberta.finetune.inputs import (
        check_inputs,
        fingerprint_inputs,
        fingerprint_weights,
        record_inputs,
    )
    from megatron_deberta.finetune.search import INPUTS_FILE, configure_runs, list_runs, read_result

    search = load_search(args.search, args.overrides)
    task = load_task(search.task)
    if args.table:
        return _show(search, list_runs(search, task), task.metrics[0], prunes=args.prune)
    with refusals():
        source = open_source_model(Path(search.model), search.tokenizer)
    runs = configure_runs(search, task, source)
    if not args.no_check:
        with refusals():
            inputs = fingerprint_inputs(task, search.data, source.tokenizer_path)
            inputs["model_fingerprint"] = fingerprint_weights(source.path)
        has_runs = any(run.folder.exists() for run in runs)
        file = Path(search.output) / INPUTS_FILE
        remedy = "restore it, or give the search another output"
        check_inputs(file, inputs, has_runs=has_runs, remedy=remedy)
        if not args.dry_run:
            record_inputs(file, inputs)
    pending = [run for run in runs if read_result(run.folder, task.metrics[0]) is None]
    if args.dry_run:
        print(_describe(search, runs, pending))
    if args.cluster and pending:
        return _submit(search, pending, args)
    if args.dry_run:
        return EXIT_DONE
    code = _run_locally(search, pending, task.metrics[0], args.jobs) if pending else EXIT_DONE
    _show(search, runs, task.metrics[0], prunes=args.prune)
    return code


def _show(search: SearchConfig, runs: Sequence[SearchRun], metric: str, *, prunes: bool) -> int:
    """Print and write the table; delete checkpoints if asked to."""
    from megatron_deberta.finetune.search import collect, format_table, prune, write_results

    if not any(run.folder.exists() for run in runs):
        raise ConfigError(f"{search.output}: no run has begun; start the search without --table")
    found = collect(runs, metric)
    files = write_results(search, metric, found)
    print(format_table(search, metric, found))
    print(f"written: {', '.join(map(str, files))}")
    if prunes:
        print(f"--prune: checkpoints of {prune(found, search.select)} runs deleted")
    return EXIT_DONE


def _describe(search: SearchConfig, runs: Sequence[SearchRun], pending: Sequence[SearchRun]) -> str:
    """Format the cells, one per line."""
    cells = list(dict.fromkeys(run.cell.name for run in runs))
    waiting = {run.name for run in pending}
    lines = [
        f"{search.output}: {len(cells)} cells x {len(search.seeds)} seeds = {len(runs)} runs, "
        f"{len(runs) - len(pending)} finished"
    ]
    for name in cells:
        left = sum(run.cell.name == name and run.name in waiting for run in runs)
        lines.append(f"  {name}{f'  ({left} to run)' if left else '  (finished)'}")
    return "\n".join(lines)


def _run_locally(
    search: SearchConfig, pending: Sequence[ConfiguredRun], metric: str, jobs: int | None
) -> int:
    """Run the pending runs here, and print a line per run that ends; return the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from megatron_deberta.finetune.local_runs import run_all, run_command, stop_signals

    slots = _slots(search, pending[0], jobs)
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Without a terminal there is no bar.
    with (
        _folder_lock(search),
        stop_signals() as stop,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=len(pending))
        failed: list[str] = []

        def report(outcome: Outcome) -> None:
            text, has_failed = _describe_end(outcome, metric, is_stopping=bool(stop.numbers))
            if has_failed:
                failed.append(outcome.run.name)
            bar.advance(task)
            place = f"[{bar.tasks[0].completed:.0f}/{len(pending)}] {outcome.run.name}"
            line = printable(f"{place}: {text}")
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        all_started = run_all(
            pending, slots, report, stop, lambda run: run_command(run, search.ranks)
        )
    if stop.numbers:
        return stop.exit_code
    if not failed:
        return EXIT_DONE
    rest = "" if all_started else "; the first ones all failed, so no more were started"
    print(f"{len(failed)} runs failed{rest}", file=sys.stderr)
    return EXIT_FAILURE


def _describe_end(outcome: Outcome, metric: str, *, is_stopping: bool) -> tuple[str, bool]:
    """Return how a run ended, and whether it failed."""
    from megatron_deberta.finetune.local_runs import LOG_FILE
    from megatron_deberta.finetune.search import read_result

    result = read_result(outcome.run.folder, metric)
    if result is not None and result.score is None:
        return f"no {metric}: infinite or not a number; lower optimizer.learning_rate", True
    if result is not None:
        return f"{metric} {result.score:.4f}, {outcome.seconds:.0f} s", False
    if is_stopping:
        return "stopped; it resumes when the search is started again", False
    log = outcome.run.folder / LOG_FILE
    return f"failed with exit code {outcome.code}: {outcome.reason} ({log})", True


@contextmanager
def _folder_lock(search: SearchConfig) -> Iterator[None]:
    lock = FileLock(Path(search.output) / ".lock")
    Path(search.output).mkdir(parents=True, exist_ok=True)
    if not lock.acquire():
        raise ConfigError(
            f"output={search.output}: another search runs in this folder; wait, or use --table"
        )
    try:
        yield
    finally:
        lock.release()


def _slots(search: SearchConfig, first: ConfiguredRun, jobs: int | None) -> list[dict[str, str]]:
    """Return the environments of the runs at a time."""
    import psutil

    from megatron_deberta.finetune.local_runs import slot_environments, visible_gpus
    from megatron_deberta.planning.plan import predict_rank_bytes

    devices = [] if first.config.train.device == "cpu" else visible_gpus()
    if devices:
        fit = len(devices) // search.ranks
        if fit < max(1, jobs or 0):
            raise ConfigError(
                f"{len(devices)} GPUs do not suffice for {jobs or 1} runs of {search.ranks} ranks; "
                "lower --jobs or ranks"
            )
    else:
        cores = len(os.sched_getaffinity(0)) // search.ranks
        memory = psutil.virtual_memory().available // (
            predict_rank_bytes(first.config) * search.ranks
        )
        fit = max(1, min(cores, memory))
    return slot_environments(jobs or fit, search.ranks, devices)


def _submit(
    search: SearchConfig, pending: Sequence[ConfiguredRun], args: argparse.Namespace
) -> int:
    """Submit the pending runs that are not queued already as job arrays."""
    profile = load_profile(args.cluster, trusted=args.trust_profile)
    profile, nodes = profile_of_ranks(profile, search.ranks)
    configs = [check_fit(run.config, profile, nodes) for run in pending]
    at_most = args.jobs or 0
    # The runs have the same model and data.
    problem = submission_problem(configs[0], profile, args)
    if args.dry_run:
        print(describe_arrays(profile, configs, Path(search.output), at_most))
        if problem:
            print(f"# error: {problem}")
        return EXIT_USAGE if problem else EXIT_DONE
    if problem:
        raise ConfigError(problem)
    # A second search would not see the jobs of this one until sbatch has answered.
    with _folder_lock(search):
        for run in pending:
            run.write_config()
        jobs, skipped = submit_arrays(profile, configs, Path(search.output), at_most)
    if skipped:
        print(f"{skipped} runs are queued or running already")
    if jobs:
        print(f"submitted {', '.join(jobs)}; see the results with --table")
    return EXIT_DONE
