"""Benchmarks and campaigns have ``--help``, and documented commands match their arguments."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.provenance import ROOT

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python -m ((?:benchmarks|tests)\.[\w.]+)([^`#\n]*)")
MAIN = '\nif __name__ == "__main__":\n'
PROGRAM = """
import argparse, contextlib, io, json, runpy, sys

class Parsed(Exception):
    pass

def stop_after(parse):
    def stopping(self, *args, **kwargs):
        parse(self, *args, **kwargs)
        raise Parsed
    return stopping

def run(name, *arguments):
    sys.argv, text = [name, *arguments], io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except Parsed:
            return True, ""
        except SystemExit as end:
            return not end.code, text.getvalue()

programs, commands = json.loads(sys.argv[1])
parse = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_intermixed_args
argparse.ArgumentParser.parse_args = stop_after(parse[0])
argparse.ArgumentParser.parse_intermixed_args = stop_after(parse[1])
results = [run(*command) for command in commands]
helps = {name: run(name, "--help") for name in programs}
print(json.dumps([helps, results]))
"""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def programs() -> list[str]:
    """Return the modules that are run with ``python -m``."""
    paths = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/faults/**/*.py")]
    return sorted(module_name(path) for path in paths if MAIN in path.read_text())


def documentation() -> str:
    """Return the text of README, docs and Makefile."""
    pages = [ROOT / "README.md", ROOT / "Makefile", *sorted(ROOT.glob("docs/**/*.md"))]
    return "\n".join(page.read_text() for page in pages).replace("\\\n", " ")


def documented_commands() -> list[list[str]]:
    """Return module and arguments of the commands in bash blocks and in the Makefile."""
    blocks = "\n".join([*BLOCK.findall(documentation()), (ROOT / "Makefile").read_text()])
    commands = COMMAND.findall(blocks.replace("\\\n", " "))
    return [[module, *shlex.split(arguments)] for module, arguments in commands]


@pytest.fixture(scope="module")
def results() -> Any:
    # A new process: some programs set environment variables at import.
    arguments = json.dumps([programs(), documented_commands()])
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_program_has_help(results: Any) -> None:
    helps, _ = results
    assert len(helps) > 15
    for name, (succeeded, text) in helps.items():
        assert succeeded, name
        assert text.startswith("usage: "), name


@pytest.mark.slow
def test_documented_commands_match_their_arguments(results: Any) -> None:
    _, outcomes = results
    commands = documented_commands()
    assert commands
    for command, (succeeded, text) in zip(commands, outcomes, strict=True):
        assert succeeded, f"{' '.join(command)}: {text}"


@pytest.mark.slow
def test_mentioned_modules_and_options_exist(results: Any) -> None:
    helps, _ = results
    for module, arguments in COMMAND.findall(documentation()):
        if module in helps:
            for option in re.findall(r"(?<= )--[\w-]+", arguments):
                assert option in helps[module][1], f"python -m {module} has no option {option}"
        else:
            path = ROOT.joinpath(*module.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_benchmarks_do_not_import_tests() -> None:
    for path in ROOT.glob("benchmarks/**/*.py"):
        assert not re.search(r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE), path
