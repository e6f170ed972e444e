"""From a run and a cluster to the two commands that start it: sbatch now, srun in the job.

Owns ``job.json`` and both argument lists, as pure functions. Refuses to call them: sbatch is called
by ``cli/submit.py``, srun by ``link.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_deberta.cluster.profile import CODE_ROOT, ClusterProfile
from megatron_deberta.cluster.slurm import names
from megatron_deberta.cluster.slurm.names import checked
from megatron_deberta.config import validate_for_world
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError, MegatronDebertaError

LAST_WORDS_SECONDS = 30
"""For supervisors to see that another has ended, and to say so."""
BATCH_SCRIPT = Path(__file__).with_name("job.sbatch")
SUPERVISOR = "megatron_deberta.cluster.watchdog.supervisor"
SUBMISSIONS = "submissions"
"""Folder in the run folder with one folder a submission: ``run.yaml`` and ``job.json``."""
LOGS = "logs"
"""Folder in the run folder with one folder a link: ``rank_N.log``."""
DEFAULT_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every rank, unless the cluster profile or the user sets another value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What a job needs to know; the content of ``job.json``."""

    job_name: str
    """SLURM's name of every link of the chain."""
    run_dir: str
    """Absolute folder of the run."""
    config: str
    """Absolute path of the resolved configuration."""
    python: str
    """Interpreter on the nodes."""
    code_root: str
    """Folder that holds the package."""
    nodes: int
    least_nodes: int
    """With so many it goes on, where SLURM has no more."""
    ranks_per_node: int
    cpus_per_rank: int
    launcher: str
    exit_wait_seconds: int
    requeue: bool
    rendezvous_interface: str
    environment: dict[str, str]
    """Variables of every rank."""
    container: str
    container_image: str
    container_mounts: list[str]
    allow_config_change: bool = False
    exclude: str = ""
    """Nodes to stay away from, whatever the run finds out about others."""
    gpus_per_node: int = 0
    node_check: bool = False
    """Check the nodes before the ranks start, against the profile's three rates."""
    least_tflops: float = 0.0
    least_node_gb_per_second: float = 0.0
    least_network_gb_per_second: float = 0.0

    @classmethod
    def read(cls, path: str | Path) -> JobSpec:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: the file is missing or something else.
        """
        try:
            data: dict[str, Any] = json.loads(Path(path).read_bytes())
            if set(data) != {item.name for item in fields(cls)}:
                raise ValueError(f"keys {sorted(data)}")
            return cls(**data)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: not a job of this release ({error}); submit anew") from None

    def to_json(self) -> bytes:
        """The content of ``job.json``."""
        return json.dumps(asdict(self), indent=1).encode()


def make_spec(
    profile: ClusterProfile,
    *,
    nodes: int,
    min_nodes: int | None = None,
    run_dir: Path,
    job_name: str,
    submission: Path,
    exported: Mapping[str, str] | None = None,
    allow_config_change: bool,
) -> JobSpec:
    """Bring a run and a cluster together.

    Args:
        profile: the cluster.
        nodes: how many of its nodes.
        min_nodes: least number of nodes to start with; None: all of them.
        run_dir: absolute folder of the run.
        job_name: SLURM's name of the job.
        submission: folder of ``run.yaml`` and ``job.json``.
        exported: environment variables that the user names; they override the profile's.
        allow_config_change: passed on to ``pretrain``.

    Raises:
        ConfigError: a name or path that may not stand on a command line.
    """
    return JobSpec(
        job_name=checked(job_name, names.NAME, "--job-name"),
        run_dir=checked(str(run_dir), names.PATH, "train.run_dir"),
        config=checked(str(submission / "run.yaml"), names.PATH, "train.run_dir"),
        python=checked(profile.python or sys.executable, names.PATH, "python"),
        code_root=checked(str(CODE_ROOT), names.PATH, "the folder of megatron_deberta"),
        nodes=nodes,
        least_nodes=nodes if min_nodes is None else min_nodes,
        ranks_per_node=profile.ranks_per_node,
        cpus_per_rank=profile.cpus_per_rank,
        launcher=profile.launcher,
        exit_wait_seconds=profile.exit_wait_seconds,
        requeue=profile.requeue,
        rendezvous_interface=profile.rendezvous_interface,
        environment=DEFAULT_ENVIRONMENT | profile.environment | dict(exported or {}),
        container=profile.container,
        container_image=profile.container_image,
        container_mounts=list(profile.container_mounts),
        allow_config_change=allow_config_change,
        exclude=profile.exclude,
        gpus_per_node=profile.gpus_per_node,
        node_check=profile.node_check,
        least_tflops=profile.least_tflops,
        least_node_gb_per_second=profile.least_node_gb_per_second,
        least_network_gb_per_second=profile.least_network_gb_per_second,
    )


def sbatch_command(
    spec: JobSpec,
    profile: ClusterProfile,
    job_file: Path,
    *,
    after: str = "",
    bad_nodes: Sequence[str] = (),
) -> list[str]:
    """The command that queues one job of a chain.

    Args:
        spec: the job.
        profile: the cluster.
        job_file: where ``job.json`` is.
        after: the job before it in the chain; starts once that has ended for good.
        bad_nodes: to stay away from, besides the profile's.
    """
    command = [
        "sbatch",
        "--parsable",
        # Neither the submitter's variables nor credentials in them; job.json has what is needed.
        "--export=NONE",
        f"--job-name={spec.job_name}",
        # One program a node starts its ranks: a supervisor, or torchrun. SLURM reckons a range's
        # tasks with the least nodes, and would give no more if told that each has one.
        *(
            [f"--nodes={spec.nodes}", "--ntasks-per-node=1"]
            if spec.least_nodes == spec.nodes
            else [f"--nodes={spec.least_nodes}-{spec.nodes}"]
        ),
        f"--cpus-per-task={spec.cpus_per_rank * spec.ranks_per_node}",
        f"--mem={profile.memory_gib_per_node}{'G' if profile.memory_gib_per_node else ''}",
        f"--time={profile.time_limit_minutes}",
        f"--signal={stop_signal(spec)}@{profile.signal_seconds}",
        "--requeue" if profile.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={spec.run_dir}/{LOGS}/link_%j.log",
    ]
    if excluded := ",".join(dict.fromkeys([spec.exclude, *bad_nodes])).strip(","):
        command.append(f"--exclude={checked(excluded, names.NAMES, 'exclude')}")
    if after:
        command.append(f"--dependency=afterany:{after}")
    if profile.gpus_per_node:
        command.append(f"--gres=gpu:{profile.gpus_per_node}")
    if profile.exclusive:
        command.append("--exclusive")
    for option in ("partition", "account", "qos"):
        if value := getattr(profile, option):
            command.append(f"--{option}={value}")
    return [*command, str(BATCH_SCRIPT), spec.python, spec.code_root, str(job_file)]


def for_nodes(spec: JobSpec, config: RunConfig, given: int) -> JobSpec:
    """The job on as many of the nodes that SLURM gave as the batch divides over.

    Args:
        spec: the job.
        config: its run.
        given: nodes that SLURM gave.

    Raises:
        ConfigError: it does not divide over any number of them.
    """
    for nodes in range(min(given, spec.nodes), 0, -1):
        try:
            validate_for_world(config, nodes * spec.ranks_per_node)
        except MegatronDebertaError:
            continue
        return replace(spec, nodes=nodes)
    raise ConfigError(
        f"train.global_batch_size={config.train.global_batch_size} does not divide over any of 1 "
        f"to {given} nodes of {spec.ranks_per_node} ranks; submit with other --nodes"
    )


def stop_signal(spec: JobSpec) -> str:
    """The signal that makes ranks save, by SLURM's name; torchrun hands on SIGTERM only."""
    return "TERM" if spec.launcher == "torchrun" else "USR1"


def link_name(job: str, restarts: int) -> str:
    """Name of a link: the job's number and how often it was requeued."""
    return f"{job}.{restarts}"


def log_folder(run_dir: str | Path, job: str, restarts: int) -> Path:
    """Folder of a link's logs."""
    return Path(run_dir) / LOGS / link_name(job, restarts)


def srun_command(spec: JobSpec, logs: Path, rendezvous: str) -> list[str]:
    """The command that starts every node of a link: its supervisor, or torchrun.

    Rank numbers run through a node before the next, which keeps tensor-parallel groups inside
    nodes.

    Args:
        spec: the job.
        logs: folder of its logs.
        rendezvous: ``address:port`` of rank 0; torchrun needs it as an argument.
    """
    if spec.launcher == "srun":
        # Supervisors end what outlives the rest, then themselves; this is for one that cannot.
        wait = spec.exit_wait_seconds + LAST_WORDS_SECONDS
        command = _task_a_node(spec, f"{logs}/node_%t.log", wait)
        return [
            *command,
            "-m",
            SUPERVISOR,
            *_job_arguments(spec, logs),
        ]
    return [
        *_task_a_node(spec, f"{logs}/rank_%t.log", spec.exit_wait_seconds),
        "-m", "torch.distributed.run", f"--nnodes={spec.nodes}",
        f"--nproc-per-node={spec.ranks_per_node}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={logs.name}", "--max-restarts=0",
        "-m", *pretrain_arguments(spec),
    ]  # fmt: skip


def check_command(spec: JobSpec, logs: Path) -> list[str]:
    """The command that checks every node of a link."""
    command = _task_a_node(spec, f"{logs}/check_%t.log", 0)
    return [*command, "-m", "megatron_deberta.cluster.node_check", *_job_arguments(spec, logs)]


def pretrain_arguments(spec: JobSpec) -> list[str]:
    """What Python is told to run as a rank, after ``-m``."""
    options = ["--allow-config-change"] if spec.allow_config_change else []
    return ["megatron_deberta", "pretrain", spec.config, *options]


def _job_arguments(spec: JobSpec, logs: Path) -> list[str]:
    """``job.json`` with the link's nodes, and the link's name, for what runs on a node."""
    return [str(logs / "job.json"), logs.name]


def _task_a_node(spec: JobSpec, output: str, wait: int) -> list[str]:
    """srun, up to the interpreter: one task on each node, in the container if there is one.

    Args:
        spec: the job.
        output: file of a task's output.
        wait: seconds that tasks may outlive the first that ends; 0: any.
    """
    command = [
        "srun",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.nodes}",
        "--ntasks-per-node=1",
        # Not inherited from sbatch since SLURM 22.05.
        f"--cpus-per-task={spec.cpus_per_rank * spec.ranks_per_node}",
        "--distribution=block:block",
        "--mpi=none",
        "--input=none",
        # Its environment is job.json's, made by link.py.
        "--export=ALL",
        # The first rank to end may end well, with others still closing their files.
        "--kill-on-bad-exit=0",
        f"--wait={wait}",
        "--open-mode=append",
        f"--output={output}",
    ]
    if spec.container == "pyxis":
        command += [f"--container-image={spec.container_image}", "--no-container-mount-home"]
        if spec.container_mounts:
            command.append(f"--container-mounts={','.join(spec.container_mounts)}")
    if spec.container == "apptainer":
        command += ["apptainer", "exec", "--nv"]
        command += [f"--bind={mount}" for mount in spec.container_mounts]
        command.append(spec.container_image)
    return [*command, spec.python]
