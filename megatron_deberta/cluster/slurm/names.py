"""Patterns of the strings that may appear on a command line; others are errors, never escaped."""

from __future__ import annotations

import re

from megatron_deberta.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,-]{0,255}")
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,31}")
ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[af]?")
BUILD = re.compile(r"[a-z]+[0-9.]*")
PATH = re.compile(r"/[\w./@+=,:~ -]*")
"""No ``%`` and no backslash: SLURM expands them in names of log files."""
IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_./:@+#-]*")
MOUNT = re.compile(r"/[\w./@+=~-]*:/[\w./@+=~-]*(:(ro|rw))?")
VARIABLE = re.compile(
    r"(NCCL|GLOO|UCX|OMP|MKL|CUDA|TORCH|TORCHINDUCTOR|TRITON|FI|IBV|DS|MEGATRON_DEBERTA)_[A-Z0-9_]+"
    r"|LD_LIBRARY_PATH|TOKENIZERS_PARALLELISM|HF_HUB_OFFLINE|HF_HOME"
)
"""Environment variables in a cluster profile: tuning, no credentials."""
EXPORTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
"""Environment variables that the user names with ``--export``."""
VALUE = re.compile(r"[^\x00-\x1f\x7f]{0,4096}")


def checked(text: str, pattern: re.Pattern[str], key: str) -> str:
    """Return the text if the whole of it matches the pattern.

    Raises:
        ConfigError: it does not.
    """
    if not pattern.fullmatch(text):
        raise ConfigError(f"{key}={text!r} is not allowed; it must match {pattern.pattern}")
    return text
