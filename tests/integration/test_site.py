"""The documentation site builds without a warning, and the package's page on PyPI has its links."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        build, cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    operator = (tmp_path / "api" / "ops" / "index.html").read_text()
    assert "disentangled_attention" in operator
    assert "key_padding" not in operator
    assert "--max-new-tokens" in (tmp_path / "commands" / "index.html").read_text()
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
    # Every public page is in the navigation of the first one.
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    linked = set(re.findall(r'href="([a-z0-9-]+)/"', (tmp_path / "index.html").read_text()))
    assert pages <= linked


def test_links_of_the_description_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("package_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    description = module.read_description()
    targets = re.findall(r"\]\(([^)]+)\)", description)
    assert len(targets) > 20
    assert all(target.startswith("https://") for target in targets)
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", description)
    assert len(pictures) == 2
    for picture in pictures:
        # A page would be shown at the address below "blob".
        before, raw, path = picture.partition("/raw/main/")
        assert (before, raw) == (module.REPOSITORY, "/raw/main/")
        assert (ROOT / path).stat().st_size < 150_000
