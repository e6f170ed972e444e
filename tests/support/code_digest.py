"""Names the code that a campaign's line is about: a line about other code does not count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tests.support.jobs import ROOT


def code_digest(places: Iterable[str]) -> str:
    """Digest of Python files.

    Args:
        places: files and folders, from the root of the project.
    """
    digest = hashlib.sha256()
    for place in places:
        found = ROOT / place
        for path in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
