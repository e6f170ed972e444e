"""Does this build of torch fit this project and these devices?

Owns the supported range of torch and the comparison of its kernels with a device. Refuses to
measure anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_deberta.errors import ConfigError

SUPPORTED_TORCH = ">=2.6,<3"
"""The same range as in setup.py; a test compares them."""


def check_torch_version(installed: str) -> None:
    """See that torch is of the supported range.

    Args:
        installed: ``torch.__version__``.

    Raises:
        ConfigError: it is not.
    """
    if not SpecifierSet(SUPPORTED_TORCH).contains(Version(installed), prereleases=True):
        raise ConfigError(
            f"torch {installed} is not {SUPPORTED_TORCH}; install one that is "
            "(MEGATRON_DEBERTA_TORCH of launch/setup_venv.sh)"
        )


def torch_problem(architecture: str, builds: Sequence[str]) -> str:
    """What is wrong with the torch installed here for a cluster's devices; empty if nothing.

    Args:
        architecture: of the devices, such as ``sm_70``; empty: not said.
        builds: builds known to hold kernels for it, such as ``cu126``; empty: any.
    """
    # The name of a build may lack in the version, as on PyPI.
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
    """See that torch has kernels for every CUDA device of this machine.

    Raises:
        ConfigError: it has none for one of them.
    """
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            capability = torch.cuda.get_device_capability(index)
            check_architecture(capability, torch.cuda.get_arch_list())


def check_architecture(capability: tuple[int, int], architectures: Sequence[str]) -> None:
    """See that torch has kernels for a device, before the first of them fails.

    Code of a major version runs on devices of that version with an equal or larger minor one; PTX
    (``compute_80``) on every newer device; ``sm_90a`` and the like only on their own.

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
        "install one that has: CUDA 12.6 builds (cu126) still hold those of sm_70"
    )
