"""Checks of an installation: Python, torch, compiler, DeepSpeed, MPI, SLURM and disk space."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

from megatron_deberta.cluster import preflight
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.errors import ConfigError

MIN_PYTHON = (3, 10)
MIN_FREE_GIB = 1.0
"""Least free disk space; ``doctor RUN.yaml`` compares with the size of a checkpoint."""


def check_python() -> str:
    """Check the version of Python.

    Raises:
        ConfigError: it is too old.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MIN_PYTHON:
        raise ConfigError(f"{version} is older than {'.'.join(map(str, MIN_PYTHON))}; install that")
    return f"{version}, {sys.executable}"


def check_torch() -> str:
    """Check the version of torch, and that it has kernels for the GPUs of this machine.

    Raises:
        ConfigError: torch is missing, not supported, or lacks kernels for a GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"cannot be imported ({error}); see launch/setup_venv.sh") from None
    preflight.check_torch_version(torch.__version__)
    preflight.check_devices()
    architectures = torch.cuda.get_arch_list()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
    kernels = f", kernels for {', '.join(architectures)}" if architectures else ""
    return f"{torch.__version__}, {devices}{kernels}"


def check_compiler() -> str:
    """Check for a C compiler and Python's headers, with which Triton builds its launchers.

    Raises:
        ConfigError: one of them is missing.
    """
    candidates = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    compiler = next(filter(None, map(shutil.which, candidates)), None)
    if compiler is None:
        raise ConfigError("no C compiler, which Triton needs on GPUs; install gcc, or set CC")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise ConfigError(
            f"{header} is missing, which Triton needs on GPUs; install Python's headers "
            "(Debian: python3-dev)"
        )
    return f"{compiler}, {header}"


def check_deepspeed() -> str:
    """Check that DeepSpeed is installed.

    Raises:
        ConfigError: it is not.
    """
    return _version("deepspeed")


def check_mpi() -> str:
    """Check for ``mpirun`` and mpi4py.

    Raises:
        ConfigError: one of them is missing.
    """
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise ConfigError("no mpirun or mpiexec; needed only to start ranks with MPI")
    return f"{program}, mpi4py {_version('mpi4py')}"


def check_slurm() -> str:
    """Check that SLURM's commands are installed.

    Raises:
        SlurmError: they are not.
    """
    return slurm.call(["sbatch", "--version"]).strip()


def check_disk() -> str:
    """Check the free space of the working directory's disk and of the temporary directory's.

    Raises:
        ConfigError: one has less than ``MIN_FREE_GIB``.
    """
    found = []
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free / 2**30
        if free < MIN_FREE_GIB:
            raise ConfigError(f"{folder}: {free:.2f} GiB free, less than {MIN_FREE_GIB:g}")
        found.append(f"{folder} {free:,.0f} GiB free")
    return ", ".join(found)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{package} is not installed; pip install {package}") from None
