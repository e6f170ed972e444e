"""Checks of a machine: Python, torch, compiler, packages, MPI, SLURM, disk space and clock."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.errors import ConfigError

DISTRIBUTION = "megatron-deberta"
EXTRAS = ("train", "text", "finetune", "onnx", "mpi", "dask", "wandb")
MIN_PYTHON = (3, 10)
MIN_FREE_GIB = 1.0
MAX_SKEW_SECONDS = 5.0
"""Clocks further apart make logs of nodes hard to read; nothing is decided by them."""
SUPPORTED_TORCH = ">=2.6,<3"
"""The same range as in pyproject.toml; a test compares them."""


def check_python() -> str:
    """Check the version of Python.

    Raises:
        ConfigError: it is too old.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MIN_PYTHON:
        raise ConfigError(f"{version} is older than {'.'.join(map(str, MIN_PYTHON))}; install that")
    return f"{version}, {sys.executable}"


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed, and of the extras that it includes.

    Raises:
        ConfigError: this package is not installed itself.
    """
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"{DISTRIBUTION} is not installed; pip install .") from error
    missing = []
    for needed in map(Requirement, lines):
        marker = needed.marker
        if (
            marker is None
            or not marker.evaluate({"extra": extra})
            or marker.evaluate({"extra": ""})
        ):
            continue
        if needed.name == DISTRIBUTION:
            missing += [name for other in needed.extras for name in missing_packages(other)]
        else:
            try:
                metadata.version(needed.name)
            except metadata.PackageNotFoundError:
                missing.append(needed.name)
    return missing


def check_extras() -> str:
    """Name the extras whose packages are installed.

    Raises:
        ConfigError: packages of some are not.
    """
    missing = {extra: missing_packages(extra) for extra in EXTRAS}
    complete = ", ".join(extra for extra, names in missing.items() if not names) or "none"
    lacking = "; ".join(f"{e} lacks {', '.join(names)}" for e, names in missing.items() if names)
    if lacking:
        raise ConfigError(f"complete: {complete}; {lacking}")
    return complete


def check_torch() -> str:
    """Check the version of torch, and that it has kernels for the GPUs of this machine.

    Raises:
        ConfigError: torch is missing, not supported, or lacks kernels for a GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"cannot be imported ({error}); see launch/setup_venv.sh") from None
    check_torch_version(torch.__version__)
    check_devices()
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


def check_mpi() -> str:
    """Check for ``mpirun`` and mpi4py.

    Raises:
        ConfigError: one of them is missing.
    """
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise ConfigError("no mpirun or mpiexec; needed only to start ranks with MPI")
    return f"{program}, mpi4py {check_package('mpi4py')}"


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
    folders = Path.cwd(), Path(tempfile.gettempdir())
    return ", ".join(check_free_space(folder) for folder in folders)


def check_free_space(folder: str | Path) -> str:
    """Check the free space of a folder's disk.

    Raises:
        ConfigError: it is less than ``MIN_FREE_GIB``.
    """
    free = shutil.disk_usage(folder).free / 2**30
    if free < MIN_FREE_GIB:
        raise ConfigError(f"{folder}: {free:.2f} GiB free, less than {MIN_FREE_GIB:g}; make room")
    return f"{folder} {free:,.0f} GiB free"


def check_clock(folder: str | Path) -> float:
    """Return the seconds by which this clock is ahead of that of a folder's disk.

    Raises:
        ConfigError: they differ by more than ``MAX_SKEW_SECONDS``.
        OSError: the folder cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(b"x")
        probe.flush()
        os.fsync(probe.fileno())
        skew = time.time() - os.fstat(probe.fileno()).st_mtime
    if abs(skew) > MAX_SKEW_SECONDS:
        raise ConfigError(f"{skew:+.1f} s from the clock of {folder}; start NTP here or there")
    return skew


def query_gpus(fields: str) -> list[list[str]]:
    """Return what ``nvidia-smi`` says of each GPU.

    Args:
        fields: of ``nvidia-smi --help-query-gpu``, comma-separated.

    Raises:
        ConfigError: the program is missing or fails.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise ConfigError("nvidia-smi is missing; is the driver loaded?")
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"nvidia-smi: {' '.join(done.stderr.split())}; drain the node")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def check_package(package: str) -> str:
    """Return the version of an installed package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{package} is not installed; pip install {package}") from None


def check_torch_version(installed: str) -> None:
    """Check that ``torch.__version__`` is in the supported range.

    Raises:
        ConfigError: it is not.
    """
    if not SpecifierSet(SUPPORTED_TORCH).contains(Version(installed), prereleases=True):
        raise ConfigError(
            f"torch {installed} is not {SUPPORTED_TORCH}; install a supported version "
            "(MEGATRON_DEBERTA_TORCH of launch/setup_venv.sh)"
        )


def torch_problem(architecture: str, builds: Sequence[str]) -> str:
    """Return why the installed torch does not fit a cluster's devices, empty if it does.

    Args:
        architecture: architecture of the devices, such as ``sm_70``; empty: unknown.
        builds: builds with kernels for it, such as ``cu126``; empty: any.
    """
    # The version may lack the name of the build, as on PyPI.
    import torch

    cuda = torch.version.cuda
    build = "cpu" if cuda is None else "cu" + cuda.replace(".", "")
    if builds and build not in builds:
        devices = architecture or "the cluster's devices"
        return (
            f"torch {torch.__version__} ({build}) has no kernels for {devices}; "
            f"install a build of {', '.join(builds)}, or name another profile; "
            "if the nodes have another torch than this machine, set python or container in the "
            "profile, or add --no-check"
        )
    return ""


def check_devices() -> None:
    """Check that torch has kernels for every CUDA device of this machine.

    Raises:
        ConfigError: it has none for one of them.
    """
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            capability = torch.cuda.get_device_capability(index)
            check_architecture(capability, torch.cuda.get_arch_list())


def check_architecture(capability: tuple[int, int], architectures: Sequence[str]) -> None:
    """Check that torch has kernels for a device.

    Code for a compute capability runs on devices of the same major version with an equal or larger
    minor version; PTX (``compute_80``) on all newer devices; ``sm_90a`` only on its own.

    Args:
        capability: ``torch.cuda.get_device_capability()``.
        architectures: ``torch.cuda.get_arch_list()``.

    Raises:
        ConfigError: it has none.
    """
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            continue
        built = int(match[2]), int(match[3])
        if match[4] == "a":
            fits = built == capability
        elif match[1] == "compute":
            fits = built <= capability
        else:
            fits = built[0] == capability[0] and built[1] <= capability[1]
        if fits:
            return
    device = f"sm_{capability[0]}{capability[1]}"
    raise ConfigError(
        f"this build of torch has no kernels for {device} (it has {', '.join(architectures)}); "
        "install one that has them; builds for CUDA 12.6 (cu126) have those of sm_70"
    )
