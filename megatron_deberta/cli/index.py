"""Build the indices of a run before it starts.

A run on more than a million documents keeps document orders and pairs on disk, in data.index_cache
or index/ in the run folder. It builds each at the start of its epoch, in one process, while the
other ranks wait. This command builds those of all epochs, of training and validation, on a local,
MPI or Dask executor. An index that exists is kept, so the command can be repeated after an
interruption, and a run may start meanwhile.

Examples:
  megatron-deberta index RUN.yaml --estimate
  megatron-deberta index RUN.yaml data.index_cache=/shared/index --workers 8
  mpirun -n 64 megatron-deberta index RUN.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import itertools

from megatron_deberta.cli.arguments import add_run_arguments
from megatron_deberta.cli.text_job import (
    add_executor_arguments,
    estimated_workers,
    executor_options,
)
from megatron_deberta.config import load_config
from megatron_deberta.observe.console import format_duration
from megatron_deberta.text.jobs.executors import local_engine, remote_engine, run_calls
from megatron_deberta.text.jobs.progress import ProgressDisplay
from megatron_deberta.train.vocab_size import with_vocab_size

# Of an entry; the most in benchmarks/results/cpu/data_index.json, of 10 million documents
_BYTES, _SECONDS, _MEMORY_BYTES = 70, 4.2e-7, 13
# Of a process that builds a small index: 291 MiB
_WORKER_BYTES = 305e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser)
    add_executor_arguments(parser, array=False)


def run(args: argparse.Namespace) -> None:
    """Build the indices and print where they are."""
    from megatron_deberta.data.build import build_index, list_indices
    from megatron_deberta.data.dataset.index_cache import WORTH_KEEPING
    from megatron_deberta.train.data import open_vocabulary

    config = with_vocab_size(load_config(args.config, args.overrides))
    _, _, vocabulary = open_vocabulary(config)
    options = executor_options(args)
    folder = config.data.index_cache or f"{config.train.run_dir}/index"
    with remote_engine(options) as remote:
        indices = list_indices(config, vocabulary)
        kept = [number for number, index in enumerate(indices) if index.is_kept]
        if args.estimate:
            sizes = [indices[number].rows.index_entries for number in kept]
            entries, workers = sum(sizes), estimated_workers(args)
            memory = workers * (_WORKER_BYTES + _MEMORY_BYTES * max(sizes, default=0))
            print(f"{len(kept)} indices of {entries:,} documents or sentences in {folder}")
            print(f"disk  at most {entries * _BYTES / 1e9:,.1f} GB")
            print(f"time  about {format_duration(entries * _SECONDS)} of a core")
            print(f"memory  {memory / 1e9:,.1f} GB for {workers} workers")
            return
        with (
            contextlib.nullcontext(remote) if remote else local_engine(options.workers) as engine,
            ProgressDisplay("index", lambda: engine.workers) as display,
        ):
            done = itertools.count()

            def advance(_: object = None) -> None:
                display.advance("build", len(kept), next(done), {})

            advance()
            calls = ((build_index, (config, vocabulary, number)) for number in kept)
            run_calls(engine, calls, advance)
    if kept:
        print(f"{folder}: {len(kept)} indices; the run opens them")
    else:
        print(
            f"nothing to build: indices of fewer than {WORTH_KEEPING:,} documents or sentences "
            "are computed in memory by each process"
        )
