"""Submit a run to a SLURM cluster.

The run is checked first, with its data and tokenizer, as by `doctor`. The job requeues itself until
the run is finished: before the time limit, after preemption, and after failures, then without the
nodes that caused them. `status`, `logs` and `cancel` take the run folder. See docs/slurm.md.

Examples:
  megatron-deberta submit RUN.yaml --cluster dgx2 --nodes 16 train.run_dir=/runs/base
  megatron-deberta submit RUN.yaml --cluster site.yaml --nodes 4 --export NCCL_DEBUG=INFO --dry-run
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_deberta.cli.arguments import add_run_arguments, add_shared, number
from megatron_deberta.cluster import installation
from megatron_deberta.cluster.profile import ClusterProfile, check_dtype, load_profile
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.commands import checked
from megatron_deberta.cluster.slurm.history import BadNodes, JobHistory, measured_stop_time
from megatron_deberta.cluster.slurm.submit import (
    BATCH_SCRIPT,
    LOGS,
    SUBMISSIONS,
    JobSpec,
    check_stop_time,
    log_folder,
    make_spec,
    sbatch_command,
)
from megatron_deberta.config import load_config, save_config, validate_for_world
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.shards.format import blend_weight
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from megatron_deberta.files import FileLock, write_atomically

_PATHS = {
    "cluster": ("prometheus_file",),
    "train": ("run_dir", "blimp_data"),
    "finetune": ("data", "cache"),
    "tokenizer": ("path",),
    "checkpoint": ("load_from", "continue_from"),
    "data": ("train", "validation", "index_cache"),
}
"""Keys of paths, by section; a job has another working directory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser)
    add_shared(
        parser, "--cluster", required=True,
        help="cluster profile: dgx2, dgx_h100, local, or a YAML file of the same form",
    )  # fmt: skip
    add_shared(parser, "--nodes", "--trust-profile", "--allow-config-change", "--no-check")
    parser.add_argument(
        "--min-nodes", type=int, metavar="N",
        help="start with as few as this many nodes if no more are available (default: --nodes)",
    )  # fmt: skip
    parser.add_argument(
        "--job-name",
        metavar="NAME",
        help="SLURM's name of the job (default: the run folder's name)",
    )
    parser.add_argument(
        "--max-attempts", type=number(int, 1), default=1, metavar="N",
        help="jobs to queue, each of which continues the one before it; a job that may requeue "
        "itself needs no more than one",
    )  # fmt: skip
    parser.add_argument(
        "--export", action="append", default=[], metavar="NAME[=VALUE]",
        help="environment variable for the ranks; without a value, that of this shell (may be "
        "repeated; nothing else of this shell's environment reaches the job)",
    )  # fmt: skip
    for option, text in (
        ("partition", "SLURM partition"),
        ("account", "SLURM account"),
        ("qos", "SLURM quality of service"),
        ("exclude", "nodes to exclude, comma-separated"),
    ):
        parser.add_argument(f"--{option}", metavar="NAME", help=f"{text} (default: the profile's)")
    parser.add_argument(
        "--time-limit-minutes", type=int, metavar="MINUTES",
        help="time limit of a job (default: the profile's)",
    )  # fmt: skip
    add_shared(parser, "--dry-run", help="print all commands and files, and submit nothing")


def run(args: argparse.Namespace) -> int:
    """Check the run, write the submission's folder, and call sbatch."""
    profile = _profile(args)
    config = load_config(args.config, args.overrides)
    nodes = (config.cluster.nodes or 0) if args.nodes is None else args.nodes
    config = check_fit(config, profile, nodes)
    min_nodes = nodes if args.min_nodes is None else args.min_nodes
    if not 1 <= min_nodes <= nodes:
        raise ConfigError(f"--min-nodes {min_nodes} must be between 1 and --nodes {nodes}")
    validate_for_world(config, min_nodes * profile.ranks_per_node)
    run_dir = Path(config.train.run_dir)
    check_stop_time(profile, measured_stop_time(JobHistory(run_dir).current()))
    submission = run_dir / SUBMISSIONS / time.strftime("%Y%m%dT%H%M%S")
    spec = make_spec(
        profile,
        nodes=nodes,
        min_nodes=min_nodes,
        run_dir=run_dir,
        job_name=args.job_name if args.job_name is not None else run_dir.name,
        submission=submission,
        exported=exported_variables(args.export, os.environ),
        allow_config_change=args.allow_config_change,
    )
    if not args.dry_run:
        refuse_queued(JobHistory(run_dir))
    problem = submission_problem(config, profile, args)
    if args.dry_run:
        command = sbatch_command(spec, profile, submission / "job.json")
        print(describe(spec, command, problem))
        return EXIT_USAGE if problem else EXIT_DONE
    if problem:
        raise ConfigError(problem)
    jobs = queue(spec, profile, submission, config, args.max_attempts)
    print(f"submitted {', '.join(jobs)}; megatron-deberta status {shlex.quote(str(run_dir))}")
    return EXIT_DONE


def submission_problem(config: RunConfig, profile: ClusterProfile, args: argparse.Namespace) -> str:
    """Return why a run would fail at its start; empty: nothing is known.

    Args:
        config: the run, with absolute paths.
        profile: the cluster.
        args: ``no_check`` and ``allow_config_change``.
    """
    from megatron_deberta.cli.doctor import file_problem

    if args.no_check:
        return ""
    problem = ""
    # A container or another interpreter has its own torch.
    if profile.container == "none" and not profile.python:
        problem = installation.torch_problem(profile.gpu_architecture, profile.torch_builds)
    return problem or file_problem(config, getattr(args, "allow_config_change", False))


def exported_variables(options: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Read the values of ``--export NAME[=VALUE]``.

    Args:
        options: the values.
        environment: supplies the values of those that have none.

    Raises:
        ConfigError: a name or value is not allowed, or the environment lacks a variable.
    """
    variables = {}
    for option in options:
        name, has_value, value = option.partition("=")
        checked(name, slurm.VARIABLE, "--export")
        if not has_value and name not in environment:
            raise ConfigError(f"--export {name}: no such variable here; give --export {name}=VALUE")
        value = value if has_value else environment[name]
        variables[name] = checked(value, slurm.VALUE, f"--export {name}")
    return variables


def queue(
    spec: JobSpec, profile: ClusterProfile, submission: Path, config: RunConfig, num_jobs: int
) -> list[str]:
    """Create the submission's folder, and call sbatch once per job.

    Args:
        spec: the job.
        profile: the cluster.
        submission: the submission's folder, which is created.
        config: the run.
        num_jobs: number of jobs, each of which continues the one before.

    Returns:
        The numbers of the jobs.

    Raises:
        ConfigError: the run has jobs in the queue, or is being submitted.
        SlurmError: sbatch failed.
    """
    history = JobHistory(spec.run_dir)
    submission.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(submission.parent / ".lock")
    if not lock.acquire():
        raise ConfigError(f"train.run_dir={spec.run_dir} is being submitted by another command")
    try:
        refuse_queued(history)
        submission.mkdir()
        (history.run_dir / LOGS).mkdir(exist_ok=True)
        save_config(config, submission / "run.yaml")
        job_file = submission / "job.json"
        write_atomically(job_file, spec.to_json())
        bad = tuple(BadNodes(spec.run_dir, config.cluster.bad_node_hours).current())
        # Before sbatch: the job may start at once, and its history begins with this line.
        history.append("submit", links=num_jobs, nodes=spec.nodes)
        jobs: list[str] = []
        for _ in range(num_jobs):
            after = jobs[-1] if jobs else ""
            command = sbatch_command(spec, profile, job_file, after=after, bad_nodes=bad)
            jobs.append(slurm.call(command).strip().split(";")[0])
            history.append("jobs", jobs=jobs[-1:])
        return jobs
    finally:
        lock.release()


def refuse_queued(history: JobHistory) -> None:
    """Check that a run has no jobs in the queue.

    Raises:
        ConfigError: it has.
    """
    state, queued = slurm.queue_state(history.submitted_jobs())
    if queued:
        raise ConfigError(
            f"train.run_dir={history.run_dir} has job {', '.join(queued)} in the queue ({state}); "
            "cancel it first (megatron-deberta cancel), or set another train.run_dir"
        )


def _profile(args: argparse.Namespace) -> ClusterProfile:
    keys = ("partition", "account", "qos", "exclude", "time_limit_minutes")
    given = {key: value for key in keys if (value := getattr(args, key)) is not None}
    return replace(load_profile(args.cluster, trusted=args.trust_profile), **given)


def check_fit(config: RunConfig, profile: ClusterProfile, nodes: int) -> RunConfig:
    """Check that a run fits a cluster, and make its paths absolute.

    Args:
        config: the run.
        profile: the cluster.
        nodes: number of nodes.

    Returns:
        The run with absolute paths and these nodes.

    Raises:
        ConfigError: the batch, the number format or the number of nodes does not fit.
        TopologyError: tensor parallelism does not fit into a node.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes} must be at least 1; set it, or cluster.nodes")
    check_dtype(config.precision.dtype, profile.dtypes)
    sized = replace(config.cluster, nodes=nodes, ranks_per_node=profile.ranks_per_node)
    config = replace(config, cluster=sized)
    validate_for_world(config, nodes * profile.ranks_per_node)
    for section, keys in _PATHS.items():
        values = getattr(config, section)
        paths = {key: _absolute(getattr(values, key)) for key in keys}
        config = replace(config, **{section: replace(values, **paths)})
    task = config.finetune.task
    if task and task.endswith((".yaml", ".yml")):
        # Not the name of a packaged task.
        config = replace(config, finetune=replace(config.finetune, task=os.path.abspath(task)))
    return config


def _absolute(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """Return an absolute path; of shards, each, but not the weights of a blend."""
    if value is None or isinstance(value, str):
        return None if value is None else os.path.abspath(value)
    return tuple(os.path.abspath(text) if blend_weight(text) is None else text for text in value)


def describe(spec: JobSpec, command: list[str], problem: str) -> str:
    """Format everything that a submission would run and write.

    Args:
        spec: the job.
        command: the sbatch command.
        problem: shown as an error; empty: none.
    """
    logs = log_folder(spec.run_dir, "JOB.0")
    lines = [
        "# sbatch, now:",
        shlex.join(command),
        "",
        f"# {BATCH_SCRIPT}, on the first node:",
        BATCH_SCRIPT.read_text().rstrip(),
        "",
        "# srun, in every job attempt (JOB.0: the job's number and its restarts):",
        shlex.join(spec.srun_command(logs, "RENDEZVOUS")),
        "",
        "# job.json:",
        json.dumps(json.loads(spec.to_json()), indent=1),
    ]
    return "\n".join([*lines, "", f"# error: {problem}"] if problem else lines)
