"""Conversion of legacy ``.bin`` weights (pickles) to safetensors in a sandboxed child process.

The only module that calls ``torch.load``, with ``weights_only=True``, in a child process that can
open no socket and start no process. Self-contained, because the child runs this file as a script.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

_SAFE_TORCH = (2, 10)
"""Older versions can execute code despite ``weights_only`` (CVE-2025-32434, CVE-2026-24747)."""
_FORBIDDEN_EVENTS = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork")


def convert_bin(source: Path, target: Path) -> None:
    """Rewrite the tensors of ``source`` as the safetensors file ``target``.

    Raises:
        ValueError: the file holds anything but tensors, is damaged, or torch is too old to read
            it safely; the message is one line.
    """
    # -I: ignore the user's site directory and the current folder, which could add code.
    command = [sys.executable, "-I", __file__, str(source), str(target)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["the child process was killed"]
        target.unlink(missing_ok=True)
        raise ValueError(lines[-1])


def _block_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_FORBIDDEN_EVENTS):
        raise PermissionError(f"{event} is not allowed while reading weights")


def _child(source: str, target: str) -> None:
    import torch
    from safetensors.torch import save_file

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _SAFE_TORCH:
        raise ValueError(f"torch {torch.__version__} reads pickles unsafely; install 2.10 or newer")
    sys.addaudithook(_block_side_effects)
    loaded = torch.load(source, map_location="cpu", weights_only=True)
    state = loaded.get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(state, dict):
        raise ValueError(f"{source} holds a {type(loaded).__name__}, not a dict of tensors")
    # Tied weights share memory in a pickle, which safetensors rejects; hence the copies.
    tensors = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }
    if not tensors:
        raise ValueError(f"{source} holds no tensors")
    save_file(tensors, target, metadata={"format": "pt"})


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2])
