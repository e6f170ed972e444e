"""Compatibility of the installed torch with this project and with devices."""

from __future__ import annotations

import re
from collections.abc import Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_deberta.errors import ConfigError

SUPPORTED_TORCH = ">=2.6,<3"
"""The same range as in pyproject.toml; a test compares them."""


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
            f"install a build of {', '.join(builds)}, or name another profile"
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
