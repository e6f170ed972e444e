"""Jobs and job arrays: their files, and the commands that queue them and start their nodes."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from megatron_deberta.cluster.profile import CODE_ROOT, ClusterProfile, NodeSettings
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.commands import checked
from megatron_deberta.cluster.slurm.history import JobHistory, StopTime
from megatron_deberta.config import load_config, save_config, validate_for_world
from megatron_deberta.config.schema import ClusterConfig, RunConfig
from megatron_deberta.errors import ConfigError, MegatronDebertaError
from megatron_deberta.files import write_atomically
from megatron_deberta.parsing import read_json

SUPERVISOR_EXIT_SECONDS = 30
"""Time for supervisors to notice that another node has ended, and to report it."""
BATCH_SCRIPT = Path(__file__).with_name("job.sbatch")
SUBMISSIONS = "submissions"
"""Folder in the run folder with ``run.yaml`` and ``job.json`` of each submission."""
LOGS = "logs"
"""Folder in the run folder with a folder of ``rank_N.log`` per job attempt."""
DEFAULT_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every rank, unless the cluster profile or the user sets another value."""
MAX_ARRAY_SIZE = 1000
"""Elements per job array; SLURM's ``MaxArraySize`` is 1001 by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec(NodeSettings):
    """A job; the content of ``job.json``. All paths are absolute."""

    job_name: str
    run_dir: str
    config: str
    """Path of the resolved configuration."""
    code_root: str
    nodes: int
    least_nodes: int
    allow_config_change: bool = False

    @classmethod
    def read(cls, path: str | Path) -> JobSpec:
        """Read ``job.json``.

        Raises:
            ConfigError: the file is missing or invalid.
        """
        remedy = "submit the run again"
        try:
            job = read_json(
                Path(path), cls, "a job of this release", error=ConfigError, remedy=remedy
            )
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; {remedy}") from None
        if job.nodes < 1 or job.ranks_per_node < 1:
            raise ConfigError(f"{path}: no nodes or no ranks; {remedy}")
        return job

    def to_json(self) -> bytes:
        """Return the content of ``job.json``."""
        return json.dumps(asdict(self), indent=1).encode()

    @property
    def stop_signal(self) -> str:
        """SLURM's name of the signal that makes ranks save; torchrun forwards only SIGTERM."""
        return "TERM" if self.launcher == "torchrun" else "USR1"

    def for_nodes(self, config: RunConfig, allocated: int) -> JobSpec:
        """Return the job with as many of the allocated nodes as the global batch divides over.

        Args:
            config: the run.
            allocated: number of nodes that SLURM has allocated.

        Raises:
            ConfigError: the batch divides over no number of them.
        """
        for nodes in range(min(allocated, self.nodes), 0, -1):
            try:
                validate_for_world(config, nodes * self.ranks_per_node)
            except MegatronDebertaError:
                continue
            return replace(self, nodes=nodes)
        raise ConfigError(
            f"train.global_batch_size={config.train.global_batch_size} does not divide over any of "
            f"1 to {allocated} nodes of {self.ranks_per_node} ranks; submit with other --nodes"
        )

    def srun_command(self, logs: Path, rendezvous: str) -> list[str]:
        """Return the command that starts a supervisor, or torchrun, on every node of an attempt.

        Ranks are numbered node by node, which keeps tensor-parallel groups inside nodes.

        Args:
            logs: folder of the attempt's logs.
            rendezvous: ``address:port`` of rank 0, for torchrun.
        """
        if self.launcher == "srun":
            # Supervisors kill ranks that outlive others, then exit; this is for one that cannot.
            wait = self.exit_wait_seconds + SUPERVISOR_EXIT_SECONDS
            return self._module_per_node(logs, "node", wait, "watchdog.supervisor")
        return [
            *self._one_task_per_node(f"{logs}/rank_%t.log", self.exit_wait_seconds),
            "-m", "torch.distributed.run", f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks_per_node}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={logs.name}", "--max-restarts=0",
            "-m", *self.pretrain_arguments(),
        ]  # fmt: skip

    def check_command(self, logs: Path) -> list[str]:
        """Return the command that checks every node of an attempt."""
        return self._module_per_node(logs, "check", 0, "node_check")

    def pretrain_arguments(self) -> list[str]:
        """Return the arguments of ``python -m`` that run a rank."""
        options = ["--allow-config-change"] if self.allow_config_change else []
        return ["megatron_deberta", "pretrain", self.config, *options]

    def _module_per_node(self, logs: Path, log: str, wait: int, module: str) -> list[str]:
        """Return the srun command of a ``cluster`` module, called with ``job.json`` and attempt."""
        command = self._one_task_per_node(f"{logs}/{log}_%t.log", wait)
        return [*command, "-m", f"megatron_deberta.cluster.{module}", f"{logs}/job.json", logs.name]

    def _one_task_per_node(self, output: str, wait: int) -> list[str]:
        """Return the srun command of one Python process per node, in the container if there is one.

        Args:
            output: file of a task's output.
            wait: seconds that tasks may outlive the first that ends; 0: no limit.
        """
        command = [
            "srun", f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1",
            # Not inherited from sbatch since SLURM 22.05.
            f"--cpus-per-task={self.cpus_per_rank * self.ranks_per_node}",
            "--distribution=block:block", "--mpi=none", "--input=none",
            # The environment is that of job.json (see job.py).
            "--export=ALL",
            # The first rank may end normally while others still close their files.
            "--kill-on-bad-exit=0",
            f"--wait={wait}", "--open-mode=append", f"--output={output}",
        ]  # fmt: skip
        if self.container == "pyxis":
            command += [f"--container-image={self.container_image}", "--no-container-mount-home"]
            if self.container_mounts:
                command.append(f"--container-mounts={','.join(self.container_mounts)}")
        if self.container == "apptainer":
            command += ["apptainer", "exec", "--nv"]
            command += [f"--bind={mount}" for mount in self.container_mounts]
            command.append(self.container_image)
        return [*command, self.python]


def make_spec(
    profile: ClusterProfile,
    *,
    nodes: int,
    min_nodes: int | None = None,
    run_dir: Path,
    job_name: str,
    submission: Path,
    exported: Mapping[str, str] | None = None,
    allow_config_change: bool = False,
) -> JobSpec:
    """Combine a run and a cluster.

    Args:
        profile: the cluster.
        nodes: number of nodes.
        min_nodes: least number of nodes to start with; None: all of them.
        run_dir: absolute folder of the run.
        job_name: SLURM's name of the job.
        submission: folder of ``run.yaml`` and ``job.json``.
        exported: environment variables that the user names; they override the profile's.
        allow_config_change: passed on to ``pretrain``.

    Raises:
        ConfigError: a name or path is not allowed on a command line.
    """
    settings = {item.name: getattr(profile, item.name) for item in fields(NodeSettings)}
    settings |= {
        "python": checked(profile.python or sys.executable, slurm.PATH, "python"),
        "environment": DEFAULT_ENVIRONMENT | profile.environment | dict(exported or {}),
    }
    return JobSpec(
        job_name=checked(job_name, slurm.NAME, "--job-name"),
        run_dir=checked(str(run_dir), slurm.PATH, "train.run_dir"),
        config=checked(str(submission / "run.yaml"), slurm.PATH, "train.run_dir"),
        code_root=checked(str(CODE_ROOT), slurm.PATH, "the folder of megatron_deberta"),
        nodes=nodes,
        least_nodes=nodes if min_nodes is None else min_nodes,
        allow_config_change=allow_config_change,
        **settings,
    )


def read_cluster_config(path: str | Path) -> ClusterConfig:
    """Return the section ``cluster`` of a run's configuration; defaults if it cannot be read."""
    try:
        return load_config(path).cluster
    except (ConfigError, OSError):
        return ClusterConfig()


def sbatch_command(
    spec: JobSpec,
    profile: ClusterProfile,
    job_file: Path,
    *,
    after: str = "",
    bad_nodes: Sequence[str] = (),
    array: str = "",
    output: str = "",
) -> list[str]:
    """Return the command that queues a job.

    Args:
        spec: the job.
        profile: the cluster.
        job_file: path of ``job.json``.
        after: number of a job that must have ended before this one starts.
        bad_nodes: nodes to exclude besides the profile's.
        array: indices of a job array; empty: a single job.
        output: log file of the batch script; empty: ``job_%j.log`` in the run folder's logs.
    """
    command = [
        "sbatch", "--parsable",
        # No variables of the submitting shell, nor credentials in them.
        "--export=NONE",
        f"--job-name={spec.job_name}",
        # One task per node: a supervisor, or torchrun. With --ntasks-per-node SLURM would count a
        # range's tasks by its least nodes, and allocate no more.
        *(
            [f"--nodes={spec.nodes}", "--ntasks-per-node=1"]
            if spec.least_nodes == spec.nodes
            else [f"--nodes={spec.least_nodes}-{spec.nodes}"]
        ),
        f"--cpus-per-task={spec.cpus_per_rank * spec.ranks_per_node}",
        f"--mem={profile.memory_gib_per_node}{'G' if profile.memory_gib_per_node else ''}",
        f"--time={profile.time_limit_minutes}",
        f"--signal={spec.stop_signal}@{profile.signal_seconds}",
        "--requeue" if profile.requeue else "--no-requeue",
        "--open-mode=append", f"--output={output or f'{spec.run_dir}/{LOGS}/job_%j.log'}",
    ]  # fmt: skip
    if excluded := ",".join(filter(None, dict.fromkeys([*spec.exclude.split(","), *bad_nodes]))):
        command.append(f"--exclude={checked(excluded, slurm.NAMES, 'exclude')}")
    if array:
        command.append(f"--array={array}")
    if after:
        command.append(f"--dependency=afterany:{after}")
    if profile.gpus_per_node:
        kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
        command.append(f"--gres=gpu:{kind}{profile.gpus_per_node}")
    if profile.exclusive:
        command.append("--exclusive")
    for option in ("partition", "account", "qos"):
        if value := getattr(profile, option):
            command.append(f"--{option}={value}")
    command += profile.sbatch_options
    return [*command, str(BATCH_SCRIPT), spec.python, spec.code_root, str(job_file)]


def attempt_name(job: str, restarts: int) -> str:
    """Return the name of a job attempt: the job's number and how often it was requeued."""
    return f"{job}.{restarts}"


def log_folder(run_dir: str | Path, attempt: str) -> Path:
    """Return the folder of a job attempt's logs."""
    return Path(run_dir) / LOGS / attempt


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


class _Array(NamedTuple):
    """A job array of independent runs, each of which requeues itself."""

    specs: Sequence[JobSpec]
    """Jobs of the runs; their files and histories are those of single jobs."""
    configs: Sequence[RunConfig]
    jobs_file: Path
    """``jobs_N.json``: the ``job.json`` of each element by its index."""
    command: list[str]


def _arrays(
    profile: ClusterProfile, configs: Sequence[RunConfig], folder: Path, time: str, at_most: int
) -> list[_Array]:
    """Divide runs into arrays; nothing is written, so that a refusal leaves nothing behind.

    Args:
        profile: the cluster.
        configs: the runs.
        folder: folder of the files of all arrays.
        time: name of the submission.
        at_most: number of runs at a time; 0: no limit.

    Raises:
        ConfigError: a path is not allowed on a command line.
    """
    specs = [
        make_spec(
            profile,
            nodes=config.cluster.nodes or 0,
            run_dir=Path(config.train.run_dir),
            job_name="search",
            submission=Path(config.train.run_dir) / SUBMISSIONS / time,
        )
        for config in configs
    ]
    files = checked(str(folder / SUBMISSIONS / time), slurm.PATH, "output") if specs else ""
    arrays = []
    for first in range(0, len(specs), MAX_ARRAY_SIZE):
        members = slice(first, first + MAX_ARRAY_SIZE)
        jobs_file = Path(files, f"jobs_{first}.json")
        command = sbatch_command(
            specs[first],
            profile,
            jobs_file,
            array=f"0-{len(specs[members]) - 1}" + (f"%{at_most}" if at_most else ""),
            output=f"{files}/job_%A_%a.log",
        )
        arrays.append(_Array(specs[members], configs[members], jobs_file, command))
    return arrays


def submit_arrays(
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
    arrays = _arrays(profile, new, folder, time.strftime("%Y%m%dT%H%M%S"), at_most)
    return [_submit_array(array) for array in arrays], len(configs) - len(new)


def _submit_array(array: _Array) -> str:
    """Write the files of an array, and call sbatch; return the array's number."""
    job_files = []
    for spec, config in zip(array.specs, array.configs, strict=True):
        submission = Path(spec.config).parent
        submission.mkdir(parents=True)
        (Path(spec.run_dir) / LOGS).mkdir(exist_ok=True)
        save_config(config, spec.config)
        write_atomically(submission / "job.json", spec.to_json())
        job_files.append(str(submission / "job.json"))
        # Before sbatch: the job may start at once, and its history begins with this line.
        JobHistory(spec.run_dir).append("submit", links=1, nodes=spec.nodes)
    array.jobs_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(array.jobs_file, json.dumps(job_files).encode())
    number = slurm.call(array.command).strip().split(";")[0]
    for index, spec in enumerate(array.specs):
        JobHistory(spec.run_dir).append("jobs", jobs=[f"{number}_{index}"])
    return number


def describe_arrays(
    profile: ClusterProfile, configs: Sequence[RunConfig], folder: Path, at_most: int = 0
) -> str:
    """Return the sbatch commands of ``submit_arrays`` with no run queued; arguments as there."""
    arrays = _arrays(profile, configs, folder, "TIME", at_most)
    return "\n".join(shlex.join(array.command) for array in arrays)


def check_stop_time(profile: ClusterProfile, measured: StopTime | None) -> None:
    """Check that a cluster leaves enough time between its signals and SIGKILL.

    Raises:
        ConfigError: it does not, by what the run has measured.
    """
    for key in ("signal_seconds", "preemption_grace_seconds"):
        seconds = getattr(profile, key)
        if measured is not None and 0 < seconds < measured.total:
            raise ConfigError(
                f"{key}={seconds} of the cluster profile is less than the {measured} that a stop "
                "of this run takes; raise it, or save faster"
            )
