"""Job arrays of independent runs: each element is a run's job, which requeues itself.

``jobs_N.json`` lists the ``job.json`` of each element by its index. In each run folder, submission
and history are those of a single job, so that ``status``, ``logs`` and ``cancel`` take it.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_deberta.cluster.profile import ClusterProfile
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm import names
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.submit import (
    LOGS,
    SUBMISSIONS,
    JobSpec,
    make_spec,
    sbatch_command,
)
from megatron_deberta.config import save_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import write_atomically
from megatron_deberta.parsing import read_json, whole_number

ARRAY_TASK = "SLURM_ARRAY_TASK_ID"
"""Environment variable with an element's index."""
MAX_SIZE = 1000
"""Elements per array; SLURM's ``MaxArraySize`` is 1001 by default."""


def profile_of_ranks(profile: ClusterProfile, ranks: int) -> tuple[ClusterProfile, int]:
    """Return the profile of a run with a number of ranks, and its number of nodes.

    A run with fewer ranks than a node has gets its share of the node's GPUs and memory.

    Args:
        profile: the cluster.
        ranks: ranks of the run.
    """
    per_node = profile.ranks_per_node
    if ranks >= per_node:
        return profile, -(-ranks // per_node)
    shared = replace(
        profile,
        ranks_per_node=ranks,
        gpus_per_node=-(-profile.gpus_per_node * ranks // per_node),
        memory_gib_per_node=-(-profile.memory_gib_per_node * ranks // per_node),
        exclusive=False,
    )
    return shared, 1


def submit(
    profile: ClusterProfile, configs: Sequence[RunConfig], folder: Path, at_most: int = 0
) -> tuple[list[str], int]:
    """Queue runs as job arrays, except those that are queued or running already.

    Args:
        profile: the cluster.
        configs: the runs, with absolute paths, for ``config.cluster.nodes`` nodes each.
        folder: absolute folder for the submission's files and logs.
        at_most: number of runs at a time; 0: no limit.

    Returns:
        The numbers of the arrays, and how many runs were queued already.

    Raises:
        ConfigError: a path is not allowed on a command line.
        SlurmError: a SLURM command failed.
    """
    queued = slurm.queued_jobs()
    new = [c for c in configs if not queued & set(JobHistory(c.train.run_dir).submitted_jobs())]
    # Before anything is written, so that a path that is not allowed leaves nothing behind.
    submission = time.strftime("%Y%m%dT%H%M%S")
    specs = [_spec(profile, config, submission) for config in new]
    numbers = []
    for first in range(0, len(specs), MAX_SIZE):
        part = slice(first, first + MAX_SIZE)
        jobs_file = folder / SUBMISSIONS / submission / f"jobs_{first}.json"
        numbers.append(_submit_array(profile, specs[part], new[part], jobs_file, at_most))
    return numbers, len(configs) - len(new)


def _submit_array(
    profile: ClusterProfile,
    specs: Sequence[JobSpec],
    configs: Sequence[RunConfig],
    jobs_file: Path,
    at_most: int,
) -> str:
    """Write the files of an array, and call sbatch; return the array's number."""
    job_files = []
    for spec, config in zip(specs, configs, strict=True):
        submission = Path(spec.config).parent
        submission.mkdir(parents=True)
        (Path(spec.run_dir) / LOGS).mkdir(exist_ok=True)
        save_config(config, spec.config)
        write_atomically(submission / "job.json", spec.to_json())
        job_files.append(str(submission / "job.json"))
        # Before sbatch: the job may start at once, and its history begins with this line.
        JobHistory(spec.run_dir).append("submit", links=1, nodes=spec.nodes)
    jobs_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(jobs_file, json.dumps(job_files).encode())
    command = _command(profile, specs, jobs_file, at_most)
    number = slurm.call(command).strip().split(";")[0]
    for index, spec in enumerate(specs):
        JobHistory(spec.run_dir).append("jobs", jobs=[f"{number}_{index}"])
    return number


def describe(
    profile: ClusterProfile, configs: Sequence[RunConfig], folder: Path, at_most: int = 0
) -> str:
    """Return the sbatch commands of ``submit`` with no run queued; arguments as in ``submit``."""
    specs = [_spec(profile, config, "TIME") for config in configs]
    lines = []
    for first in range(0, len(specs), MAX_SIZE):
        jobs_file = folder / SUBMISSIONS / "TIME" / f"jobs_{first}.json"
        part = specs[first : first + MAX_SIZE]
        lines.append(shlex.join(_command(profile, part, jobs_file, at_most)))
    return "\n".join(lines)


def _spec(profile: ClusterProfile, config: RunConfig, submission: str) -> JobSpec:
    run_dir = Path(config.train.run_dir)
    return make_spec(
        profile,
        nodes=config.cluster.nodes or 0,
        run_dir=run_dir,
        job_name="search",
        submission=run_dir / SUBMISSIONS / submission,
        allow_config_change=False,
    )


def _command(
    profile: ClusterProfile, specs: Sequence[JobSpec], jobs_file: Path, at_most: int
) -> list[str]:
    folder = names.checked(str(jobs_file.parent), names.PATH, "output")
    limit = f"%{at_most}" if at_most else ""
    return sbatch_command(
        specs[0],
        profile,
        jobs_file,
        array=f"0-{len(specs) - 1}{limit}",
        output=f"{folder}/job_%A_%a.log",
    )


def job_file(argument: str, variables: Mapping[str, str]) -> str:
    """Return the ``job.json`` of a batch script; that of its element in an array.

    Args:
        argument: ``job.json`` or, in an array, ``jobs_N.json``.
        variables: environment of the batch script.
    """
    if not variables.get(ARRAY_TASK):
        return argument
    remedy = "submit the search again"
    files = read_json(Path(argument), list[str], "a list of jobs", remedy=remedy, error=ConfigError)
    index = whole_number(variables, ARRAY_TASK, 0)
    if index >= len(files):
        raise ConfigError(f"{argument}: no job {index}; {remedy}")
    return files[index]
