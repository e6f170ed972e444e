"""Cluster profiles (``profiles/*.yaml``): nodes, devices, networks, limits and SLURM settings."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.commands import checked
from megatron_deberta.config.loader import mentions_interpolation, read_value
from megatron_deberta.config.yaml_reader import TextLoader, read_yaml
from megatron_deberta.errors import ConfigError

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains the package."""
PROFILES = Path(__file__).with_name("profiles")
SBATCH_OPTIONS = (
    "--comment", "--constraint", "--licenses", "--mail-type", "--mail-user", "--nice", "--prefer",
    "--reservation", "--switches", "--tmp", "--wckey",
)  # fmt: skip
"""Options of ``sbatch_options``: none runs code, or contradicts an option of ``submit``."""
TUNING = frozenset(
    f"{prefix}_{name}"
    for prefix, names in {
        "CUDA": "DEVICE_MAX_CONNECTIONS DEVICE_ORDER LAUNCH_BLOCKING MODULE_LOADING "
        "VISIBLE_DEVICES",
        "DS": "ACCELERATOR",
        "FI": "EFA_FORK_SAFE EFA_USE_DEVICE_RDMA PROVIDER",
        "GLOO": "SOCKET_IFNAME",
        "HF": "HUB_OFFLINE",
        "IBV": "FORK_SAFE",
        "MEGATRON_DEBERTA": "ATTENTION CHECK",
        "MKL": "NUM_THREADS",
        "NCCL": "ALGO BUFFSIZE COLLNET_ENABLE COMM_BLOCKING CROSS_NIC CUMEM_ENABLE DEBUG "
        "DEBUG_SUBSYS DMABUF_ENABLE IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_DISABLE "
        "IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION "
        "IB_RETRY_CNT IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT "
        "IGNORE_CPU_AFFINITY LAUNCH_MODE MAX_CTAS MAX_NCHANNELS MIN_CTAS MIN_NCHANNELS "
        "MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET_GDR_LEVEL NET_GDR_READ NSOCKS_PERTHREAD NTHREADS "
        "NVLS_ENABLE OOB_NET_IFNAME P2P_DISABLE P2P_LEVEL PROTO PXN_DISABLE SHM_DISABLE "
        "SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS",
        "OMP": "NUM_THREADS PLACES PROC_BIND",
        "PYTORCH": "ALLOC_CONF CUDA_ALLOC_CONF",
        "TOKENIZERS": "PARALLELISM",
        "TORCH": "CPP_LOG_LEVEL DISTRIBUTED_DEBUG NCCL_ASYNC_ERROR_HANDLING "
        "NCCL_AVOID_RECORD_STREAMS NCCL_BLOCKING_WAIT NCCL_ENABLE_MONITORING "
        "NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_TRACE_BUFFER_SIZE SHOW_CPP_STACKTRACES",
        "UCX": "IB_GID_INDEX NET_DEVICES TLS",
    }.items()
    for name in names.split()
)
"""Variables of any cluster profile: none names a file, library or plug-in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """Settings of a cluster profile that a job takes over."""

    ranks_per_node: int
    """Ranks per node: one per GPU."""
    gpus_per_node: int = 0
    """GPUs requested per node."""
    cpus_per_rank: int = 1
    """Cores per rank."""
    exclude: str = ""
    """Nodes to exclude, comma-separated."""
    requeue: bool = True
    """Let jobs requeue themselves; otherwise use ``submit --max-attempts``."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """What starts the ranks: a supervisor per node (srun), or one torchrun per node."""
    exit_wait_seconds: int = 60
    """Seconds that ranks may outlive the first that has ended."""
    node_check: bool = False
    """Check every node before ranks start, and exclude those that fail."""
    least_tflops: float = 0.0
    """Node check: minimum fp16 matrix rate of a GPU; 0: compare with the node's other GPUs only."""
    least_node_gb_per_second: float = 0.0
    """Node check: minimum bus bandwidth of an all-reduce of a node's GPUs; 0: any."""
    least_network_gb_per_second: float = 0.0
    """Node check: minimum bus bandwidth of an all-reduce of one GPU per node; 0: any."""
    rendezvous_interface: str = ""
    """Network interface of the first node for the rendezvous; empty: use the node's name."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank: NCCL, InfiniBand, threads."""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    """Container runtime of the ranks."""
    container_image: str = ""
    """Image of ``container``: a file, or a name in a registry."""
    container_mounts: tuple[str, ...] = ()
    """``/host:/inside[:ro]``; must include the code, the run folder and the data."""
    python: str = ""
    """Interpreter on the nodes; empty: that of ``submit``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterProfile(NodeSettings):
    """Nodes, devices and SLURM settings of a cluster."""

    gpu_architecture: str = ""
    """Architecture of the GPUs, such as ``sm_70``; empty: unknown."""
    device: str = ""
    """Name of the GPUs in ``planning.machine``; empty: unknown, ``plan`` needs ``--device``."""
    network_gbit_per_second: int = 0
    """Bandwidth of all of a node's compute adapters, one way; 0: unknown."""
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    """Values of ``precision.dtype`` that the devices support."""
    torch_builds: tuple[str, ...] = ()
    """Builds of torch (the part after ``+``) with kernels for the GPUs; empty: any."""
    gpu_type: str = ""
    """Type in ``--gres=gpu:TYPE:N``, such as ``a100``; empty: none."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of ``sbatch``, such as ``--constraint=a100`` or ``--reservation=x``."""
    memory_gib_per_node: int = 0
    """Host memory requested per node; 0: all of it."""
    exclusive: bool = False
    """Do not share nodes with other jobs."""
    partition: str = ""
    """SLURM partition; empty: the site's default."""
    account: str = ""
    """SLURM account; empty: the user's default."""
    qos: str = ""
    """SLURM quality of service; empty: the default."""
    time_limit_minutes: int = 1440
    """Time limit of a job attempt."""
    signal_seconds: int = 600
    """Seconds before the limit at which ranks are told to save; SLURM may be a minute early."""
    preemption_grace_seconds: int = 0
    """Seconds from SIGTERM to SIGKILL at preemption: SLURM's ``GraceTime``; 0: not specified."""

    def __post_init__(self) -> None:
        """Check numbers, and strings that reach a command line.

        Raises:
            ConfigError: a value is not allowed.
        """
        for key in ("ranks_per_node", "cpus_per_rank", "time_limit_minutes"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} must be at least 1")
        for key, value in asdict(self).items():
            if isinstance(value, int | float) and value < 0:
                raise ConfigError(f"{key}={value} must not be negative")
        if self.signal_seconds >= 60 * self.time_limit_minutes:
            raise ConfigError(
                f"signal_seconds={self.signal_seconds} is not less than time_limit_minutes="
                f"{self.time_limit_minutes}; leave time to train"
            )
        patterns = {
            "gpu_architecture": slurm.ARCHITECTURE, "device": slurm.NAME,
            "gpu_type": slurm.NAME, "partition": slurm.NAMES,
            "account": slurm.NAME, "qos": slurm.NAME, "exclude": slurm.NAMES,
            "rendezvous_interface": slurm.INTERFACE, "container_image": slurm.IMAGE,
            "python": slurm.PATH,
        }  # fmt: skip
        for key, pattern in patterns.items():
            if getattr(self, key):
                checked(getattr(self, key), pattern, key)
        for mount in self.container_mounts:
            checked(mount, slurm.MOUNT, "container_mounts")
        for build in self.torch_builds:
            checked(build, slurm.BUILD, "torch_builds")
        _check_sbatch(self)
        for name, value in self.environment.items():
            checked(name, slurm.VARIABLE, "environment")
            checked(value, slurm.VALUE, f"environment.{name}")
        if (self.container == "none") != (self.container_image == ""):
            raise ConfigError(
                f"container={self.container} with container_image={self.container_image!r}; set "
                "both a runtime and an image, or neither"
            )


def _check_sbatch(profile: ClusterProfile) -> None:
    if profile.gpu_type and not profile.gpus_per_node:
        raise ConfigError(f"gpu_type={profile.gpu_type} without GPUs; set gpus_per_node")
    for option in profile.sbatch_options:
        name, _, _ = option.partition("=")
        if name not in SBATCH_OPTIONS:
            raise ConfigError(
                f"sbatch_options={option}: {name} is not supported; use --NAME=VALUE with one "
                f"of {', '.join(SBATCH_OPTIONS)}"
            )
        checked(option, slurm.OPTION, "sbatch_options")


def check_dtype(dtype: str, supported: Sequence[str]) -> None:
    """Check ``precision.dtype`` against the number formats that a cluster's devices support.

    Raises:
        ConfigError: it is not supported.
    """
    if dtype != "auto" and dtype not in supported:
        raise ConfigError(
            f"precision.dtype={dtype} is not supported by the cluster's devices; use "
            f"{' or '.join(supported)}"
        )


def load_profile(name: str, *, trusted: bool = False) -> ClusterProfile:
    """Read a cluster profile.

    Args:
        name: name in ``cluster/profiles/``, or path of a YAML file.
        trusted: allow what can run code: an interpreter, a container, and environment variables
            other than ``TUNING``.

    Raises:
        ConfigError: no such profile, an unknown or missing key, or a value that is not allowed.
    """
    profiles = {path.stem: path for path in sorted(PROFILES.glob("*.yaml"))}
    path = Path(name) if name.endswith((".yaml", ".yml")) else profiles.get(name)
    if path is None:
        raise ConfigError(
            f"--cluster {name}: no such profile; use one of {', '.join(profiles)}, or a YAML file"
        )
    data = read_yaml(path, TextLoader)
    known = get_type_hints(ClusterProfile)
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"{path}: no key {key}; {hint}")
    if "ranks_per_node" not in data:
        raise ConfigError(f"{path}: ranks_per_node is missing; add the number of ranks per node")
    values = {}
    for key, value in data.items():
        if mentions_interpolation(value):
            raise ConfigError(
                f"{path}: {key}={value!r}: '${{' and '???' are not supported; write the value"
            )
        try:
            values[key] = _typed(known[key], value, key, path)
        except (OverflowError, ValueError) as error:
            raise ConfigError(
                f"{path}: {key}={value!r} is not of type {_type_name(known[key])}"
            ) from error
    try:
        profile = ClusterProfile(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not trusted and (setting := _runs_code(profile)):
        raise ConfigError(
            f"{path}: {setting} can run other code as you; check the file, then add --trust-profile"
        )
    return profile


def _typed(hint: Any, value: Any, key: str, path: Path) -> Any:
    """Return a value as its key demands: the variable ``NCCL_DEBUG: 010`` is the text ``010``."""
    if hint != dict[str, str]:
        return read_value(hint, value, key, str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no mapping")
    return {name: read_value(str, item, f"{key}.{name}", str(path)) for name, item in value.items()}


def _type_name(hint: Any) -> str:
    return hint.__name__ if hint in (int, float, str, bool) else str(hint)


def _runs_code(profile: ClusterProfile) -> str:
    """Return the first setting that can run code of the profile's author; empty: none."""
    for key in ("python", "container_image"):
        if value := getattr(profile, key):
            return f"{key}={value}"
    unlisted = sorted(profile.environment.keys() - TUNING)
    return f"environment={unlisted[0]!r}" if unlisted else ""
