"""Patterns of the strings that may appear on a command line; others are errors, never escaped."""

from __future__ import annotations

import re

from megatron_deberta.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,255}(,+[A-Za-z0-9][A-Za-z0-9_.-]{0,255})*,*")
"""Nodes or partitions, of which there may be any number."""
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,31}")
ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[af]?")
BUILD = re.compile(r"[a-z]+[0-9.]*")
PATH = re.compile(r"/[\w./@+=,:~ -]*")
"""No ``%`` and no backslash: SLURM expands them in names of log files."""
IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_./:@+#-]*")
MOUNT = re.compile(r"/[\w./@+=~-]*:/[\w./@+=~-]*(:(ro|rw))?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
"""Environment variables."""
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
VALUE = re.compile(r"[^\x00-\x1f\x7f]{0,4096}")


def checked(text: str, pattern: re.Pattern[str], key: str) -> str:
    """Return the text if the whole of it matches the pattern.

    Args:
        text: the value.
        pattern: what it must match.
        key: name of the value, for the message.

    Raises:
        ConfigError: it does not.
    """
    if not pattern.fullmatch(text):
        raise ConfigError(f"{key}={text!r} is not allowed; it must match {pattern.pattern}")
    return text
