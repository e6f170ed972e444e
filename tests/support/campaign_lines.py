"""The lines of a campaign, and the code one is about: a line about other code does not count."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.jobs import ROOT


def code_digest(places: Iterable[str]) -> str:
    """Digest of Python files, but for GPU kernels: no campaign runs a line of those.

    Args:
        places: files and folders, from the root of the project.
    """
    digest = hashlib.sha256()
    for place in places:
        found = ROOT / place
        for path in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
            if path.name.startswith("triton_"):
                continue
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All cases so far; none without a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
