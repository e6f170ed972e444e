"""What campaigns of numbered cases share: options, a folder with a corpus, and skipped results."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, append_line, code_digest, read_lines
from benchmarks.lib.provenance import provenance
from tests.faults.forked_ranks import preload
from tests.support.jobs import prepare


def add_options(parser: argparse.ArgumentParser, output: Path) -> None:
    """Add the options of all campaigns of numbered cases."""
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--output", type=Path, default=output)


def run_numbered(
    doc: str,
    name: str,
    count: int,
    places: Iterable[str],
    open_cases: Callable[[], AbstractContextManager[Callable[..., dict[str, Any]]]],
) -> int:
    """Parse the options of a campaign and run its missing cases; return 1 if a case failed.

    Args:
        doc: description of the program.
        name: of the program and of its file of results.
        count: number of cases.
        places: on whose code results depend.
        open_cases: yields a function that runs the ``case`` with a number.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=count, help=f"number of cases ({count})")
    parser.add_argument(
        "--only", type=int, nargs="+", default=[], metavar="NUMBER", help="repeat these cases"
    )
    add_options(parser, RESULTS / f"{name}.jsonl")
    args = parser.parse_args()
    cases = [
        (f"python -m tests.faults.{name} --only {number}", {"case": number})
        for number in args.only or range(args.cases)
    ]
    with open_cases() as run_case:
        return run_missing(args, places, cases, run_case, repeat=bool(args.only))


@contextmanager
def corpus_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder with a run in ``corpus``; what ranks import is imported."""
    # Not a TemporaryDirectory: every forked rank would remove it on exit.
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        (folder / "corpus").mkdir()
        prepare(folder / "corpus")
        preload()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_missing(
    args: argparse.Namespace,
    places: Iterable[str],
    cases: Iterable[tuple[str, Mapping[str, Any]]],
    run_case: Callable[..., dict[str, Any]],
    *,
    repeat: bool = False,
) -> int:
    """Run the cases without a result of the present code; return 1 if a case failed.

    Args:
        args: parsed ``add_options``.
        places: on whose code results depend.
        cases: the command that repeats a case, and the fields that identify it.
        run_case: given these fields, returns the result.
        repeat: run cases with a result, too.
    """
    end, code = time.monotonic() + args.seconds, code_digest(places)

    def known() -> list[dict[str, Any]]:
        return [line for line in read_lines(args.output) if line["code_digest"] == code]

    for command, key in cases:
        is_done = any(all(line[k] == v for k, v in key.items()) for line in known())
        if (is_done and not repeat) or time.monotonic() > end:
            continue
        line = {**key, **run_case(**key), "command": command, "code_digest": code}
        append_line(args.output, {**line, **provenance()})
        print(f"{command}: {'ok' if line['ok'] else 'FAILED'} {line}", flush=True)
    return int(not all(line["ok"] for line in known()))
