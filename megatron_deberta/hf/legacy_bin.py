"""Turns an old ``.bin`` weight file, which is a pickle, into safetensors, in a process of its own.

The one place that may call ``torch.load``, always with ``weights_only=True``, in a child process
that has no network and may start nothing. Owns that child and the parent's call. Refuses names.
Self-contained, because the child runs this file alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

_SAFE_TORCH = (2, 10)
"""Before it, ``weights_only`` could be made to run code (CVE-2025-32434, CVE-2026-24747)."""
_FORBIDDEN_EVENTS = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork")


def convert_bin(source: Path, target: Path) -> None:
    """Rewrite the tensors of ``source`` as the safetensors file ``target``.

    Raises:
        ValueError: the file holds anything but tensors, or is damaged, or torch is too old to
            read it safely; the message is one line.
    """
    # -I: neither the user's site directory nor the current folder can add code to the child.
    command = [sys.executable, "-I", __file__, str(source), str(target)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["the reading process died"]
        target.unlink(missing_ok=True)
        raise ValueError(lines[-1])


def _refuse_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_FORBIDDEN_EVENTS):
        raise PermissionError(f"{event} is not allowed while reading weights")


def _child(source: str, target: str) -> None:
    import torch
    from safetensors.torch import save_file

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _SAFE_TORCH:
        raise ValueError(f"torch {torch.__version__} reads pickles unsafely; install 2.10 or newer")
    sys.addaudithook(_refuse_side_effects)
    loaded = torch.load(source, map_location="cpu", weights_only=True)
    state = loaded.get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(state, dict):
        raise ValueError(f"{source} holds a {type(loaded).__name__}, not a dict of tensors")
    # Tied weights share memory in a pickle, which safetensors does not store; hence the copies.
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
