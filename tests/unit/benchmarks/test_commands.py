"""Every benchmark has ``--help``, and the documentation names existing modules and options."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.provenance import ROOT

COMMAND = re.compile(r"python -m ((?:benchmarks|tests)[\w.]*)([^`#\n]*)")
MAIN = '\nif __name__ == "__main__":\n'
PROGRAM = """
import contextlib, io, json, runpy, sys
helps = {}
for name in sys.argv[1:]:
    sys.argv, text = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code, name
    helps[name] = text.getvalue()
print(json.dumps(helps))
"""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def programs() -> list[str]:
    """Modules that are run with ``python -m``."""
    found = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/faults/**/*.py")]
    return sorted(module_name(path) for path in found if MAIN in path.read_text())


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    # A new process: some programs set environment variables at import.
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *programs()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    printed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return printed


def test_every_program_has_help(helps: dict[str, str]) -> None:
    assert len(helps) > 15
    for name, text in helps.items():
        assert text.startswith("usage: "), name


def test_documented_commands_exist(helps: dict[str, str]) -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/**/*.md")]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    commands = COMMAND.findall(text)
    assert commands
    for module, arguments in commands:
        if module in helps:
            for option in re.findall(r"(?<= )--[\w-]+", arguments):
                assert option in helps[module], f"python -m {module} has no option {option}"
        else:
            path = ROOT.joinpath(*module.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_benchmarks_do_not_import_tests() -> None:
    for path in ROOT.glob("benchmarks/**/*.py"):
        assert not re.search(r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE), path
