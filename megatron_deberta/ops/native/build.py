"""Compilation of the CPU kernels with the machine's C++ compiler, at their first use.

The library is kept in a cache folder under a name that depends on the source, the compiler, its
options and the processor, so that nodes of different kinds can share a home folder. It ends with
the SHA-256 of the rest; a damaged one is compiled again.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from megatron_deberta.files import fsync_path

SOURCE, HEADER = (Path(__file__).with_name(name) for name in ("kernels.cpp", "vectors.h"))
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
_log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, with one warning, where they cannot be compiled."""
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(compile_library(compiler, cache_folder())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else error)
        _log.warning("the CPU kernels cannot be compiled, slower ones are used: %s", reason)
        return None


def find_compiler() -> str | None:
    """Return the path of ``$CXX``, else of ``g++`` or ``clang++``; None: there is none."""
    chosen = os.environ.get("CXX")
    names = (chosen,) if chosen else ("g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """Return ``$MEGATRON_DEBERTA_CACHE`` or a folder in the user's cache folder.

    Raises:
        OSError: it cannot be made, or belongs to another user or can be written by others.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("MEGATRON_DEBERTA_CACHE") or Path(home) / "megatron_deberta")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{folder}: others than you own it or can write to it; run chmod 700 on it")
    return folder


def compile_library(compiler: str, folder: Path) -> Path:
    """Compile the kernels unless the folder has them, undamaged.

    Args:
        compiler: path of the compiler.
        folder: of the result.

    Raises:
        OSError: the folder cannot be written.
        subprocess.SubprocessError: the compiler failed.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + HEADER.read_bytes())
    digest.update("\n".join((*OPTIONS, _version(compiler), _processor())).encode())
    result = folder / f"attention-{digest.hexdigest()[:24]}.so"
    if _is_intact(result):
        return result
    # Processes may compile at the same time; the last one to rename wins.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        output = Path(own) / result.name
        command = [compiler, *OPTIONS, "-o", str(output), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        content = output.read_bytes()
        # The loader ignores what follows the last section.
        output.write_bytes(content + hashlib.sha256(content).digest())
        fsync_path(output)
        output.replace(result)
    return result


def _is_intact(path: Path) -> bool:
    """Return whether a library is there and ends with the SHA-256 of the rest."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _version(compiler: str) -> str:
    command = [compiler, "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _processor() -> str:
    """Return the machine type and the processor's model and flags, which ``-march=native`` uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features")
    return "\n".join([platform.machine(), *sorted({x for x in lines if x.startswith(kinds)})])
