"""End a run's chain of jobs: with a checkpoint, or at once.

megatron-deberta cancel RUN_DIR

What waits is taken out of the queue; what runs saves at the end of its step and ends. Nothing of
the chain starts again; submit queues a new one, which continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.job import submitted_jobs
from megatron_deberta.cluster.slurm.submit import SUBMISSIONS, JobSpec, stop_signal
from megatron_deberta.errors import EXIT_DONE, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--now", action="store_true", help="do not wait for a checkpoint")


def run(args: argparse.Namespace) -> int:
    """Cancel what SLURM has of the run."""
    chain = JobHistory(Path(args.run_dir))
    jobs = submitted_jobs(chain)
    if not jobs:
        raise ConfigError(f"{args.run_dir}: no job was submitted for it; name the run's folder")
    newest = max((chain.run_dir / SUBMISSIONS).glob("*/job.json"))
    signal = f"--signal={stop_signal(JobSpec.read(newest))}"
    # First, so that no link asks for another.
    chain.append("cancel", now=args.now)
    for job in jobs:
        slurm.cancel_pending(job)
        if slurm.job_info(job).get("JobState") != "RUNNING":
            continue
        slurm.call(["scancel", job] if args.now else ["scancel", signal, job])
        print(f"job {job}: {'cancelled' if args.now else 'saving, then ending'}")
    print(f"nothing of {args.run_dir} will start again")
    return EXIT_DONE
