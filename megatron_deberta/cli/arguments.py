"""The parser of subcommands, arguments that several of them share, and tables of text."""

from __future__ import annotations

import argparse
import copy
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_deberta.errors import ConfigError
from megatron_deberta.files import did_you_mean

FORMER_OPTIONS = {
    "--all-links": "--all-attempts",
    "--achieved": "--mfu",
    "--allow-bad": "--max-bad-fraction",
    "--least-nodes": "--min-nodes",
    "--links": "--max-attempts",
    "--plan": "--estimate",
    "--restarts": "--max-restarts",
    "--tokens": "--max-new-tokens",
    "--world-size": "--ranks",
    "verify --jobs": "--workers",
}
"""New by old option; with a command before it, of this command only."""
MAX_RESTARTS = 10
"""Restarts after failures of ranks that run on this machine."""
_RUN_FILES = ("config.yaml", "metrics.jsonl", "chain.jsonl", "checkpoints", "lock", "submissions")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_SIMILAR = 0.75
"""Similarity of options, as difflib measures it, from which one may be meant by the other."""
_MOST = sys.float_info.max
_DEFAULT = " (default: %(default)s)"


class Subcommand(NamedTuple):
    """A form of a command with arguments of its own, such as ``inspect data``.

    Attributes:
        text: summary, then description and examples, as in the docstring of a command's module.
        add_arguments: declares the arguments.
        run: runs it; returns the exit code, or None for 0.
    """

    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]


class CommandParser(argparse.ArgumentParser):
    """Parser of a subcommand: wrong usage is a ``ConfigError``, and ``--help`` shows defaults."""

    _given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Reject the arguments.

        Raises:
            ConfigError: always.
        """
        suggestion = self._suggestion()
        if "required" in message and suggestion.startswith("; set "):
            suggestion = ""  # A key cannot stand for a missing argument.
        raise ConfigError(f"{message}{suggestion}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and keep the arguments for `error`."""
        # It is called again for the arguments that an earlier call left.
        self._given = self._given or [*(args or ())]
        return super().parse_known_args(args, namespace)

    def _suggestion(self) -> str:
        """Return what an unknown option may mean: a key of the configuration, or another option."""
        options = self._option_string_actions
        takes_keys = any(action.dest == "overrides" for action in self._actions)
        for position, text in enumerate(self._given):
            name, equals, value = text.partition("=")
            is_known = any(option.startswith(name) for option in options)
            if not _OPTION.fullmatch(name) or is_known:
                continue
            if takes_keys and (keys := _keys_named(name.strip("-").replace("-", "_"))):
                following = self._given[position + 1 : position + 2]
                if not equals and following and not following[0].startswith("-"):
                    value = following[0]
                shown = value or "VALUE"
                return f"; set {' or '.join(f'{key}={shown}' for key in keys)}"
            if similar := difflib.get_close_matches(name, options, 1, _SIMILAR):
                return f"; did you mean {similar[0]}?"
        return ""


def _keys_named(name: str) -> list[str]:
    """Return the keys of a run's configuration, as ``section.key``, that have a name."""
    # Imported here because --help does not need it.
    from megatron_deberta.config.loader import key_types
    from megatron_deberta.config.schema import SECTIONS

    return [f"{section}.{name}" for section in SECTIONS if name in key_types(section)]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks of descriptions, and appends an option's default to its help."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_default = isinstance(action.default, int | float | str) and action.option_strings
        hidden = action.default in ("", argparse.SUPPRESS) or action.nargs == 0
        return text if hidden or not has_default or "(default" in text else text + _DEFAULT


def number(
    kind: type[int] | type[float], least: float, most: float = _MOST
) -> Callable[[str], Any]:
    """Return the ``type`` of an argument that is a number from ``least`` to ``most``.

    Args:
        kind: ``int`` or ``float``.
        least: smallest number allowed.
        most: largest number allowed.
    """
    limits = f"at least {least:g}" if most == _MOST else f"between {least:g} and {most:g}"

    def parse(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be {limits}")
        return value

    # argparse names it in its message about text that is no number.
    parse.__name__ = kind.__name__
    return parse


SHARED: dict[str, dict[str, Any]] = {
    "config": {
        "metavar": "RUN.yaml",
        "help": "configuration of the run; packaged ones are called configs/runs/NAME.yaml",
    },
    "overrides": {
        # With the default, argparse does not call them required.
        "nargs": "*", "default": [], "metavar": "section.key=value",
        "help": "replaces a value of the configuration, such as train.steps=1000",
    },
    "run_dir": {
        "metavar": "RUN_DIR", "help": "folder of the run (train.run_dir of its configuration)",
    },
    "shards": {
        "nargs": "*", "default": [], "metavar": "SHARD",
        "help": "path without .bin/.idx, any file of a shard, or a folder of shards",
    },
    "task": {"default": "", "metavar": "TASK", "help": "task file, or name such as sst2"},
    "--allow-config-change": {
        "action": "store_true",
        "help": "resume with another optimizer, precision or number of steps",
    },
    "--cluster": {"metavar": "PROFILE"},
    "--data": {"default": "", "metavar": "DIR", "help": "folder of the task's files"},
    "--dry-run": {
        "action": "store_true",
        "help": "print the resolved configuration, ranks, batch and parameters, and exit",
    },
    "--every": {
        "type": number(int, 1), "metavar": "N",
        "help": "use every n-th kept checkpoint, and the last one",
    },
    "--form": {"choices": ("masked", "autoregressive")},
    "--json": {"action": "store_true", "help": "print JSON"},
    "--leaderboard": {
        "default": "", "metavar": "DIR", "help": "folder for the leaderboard's files",
    },
    "--max-restarts": {
        "type": number(int, 0), "metavar": "N", "default": MAX_RESTARTS,
        "help": "most restarts after failures",
    },
    "--model": {
        "required": True, "metavar": "MODEL", "help": "run, checkpoint, export or release",
    },
    "--no-check": {
        "action": "store_true",
        "help": "do not check torch, tokenizer, data, checkpoint and run folder first, for a "
        "cluster whose files are not visible from here, or whose nodes have another torch",
    },
    "--nodes": {
        "type": int, "metavar": "N", "help": "number of nodes (default: cluster.nodes)",
    },
    "--num-samples": {"type": number(int, 0), "default": 3, "metavar": "N"},
    "--output": {"default": "", "metavar": "FILE"},
    "--prefix": {
        "action": "append", "default": [], "metavar": "SHARD", "help": "the same, as an option",
    },
    "--ranks": {"type": number(int, 1), "metavar": "N"},
    "--seed": {"type": int, "metavar": "N"},
    "--sequence-length": {"type": int, "metavar": "N"},
    "--settings": {"default": "", "metavar": "NAME"},
    "--split": {"metavar": "NAME"},
    "--task": {"default": "", "metavar": "TASK", "help": "task file, or name such as sst2"},
    "--tokenizer": {
        "default": "", "metavar": "DIR", "help": "tokenizer (default: the model's own)",
    },
    "--trust-profile": {
        "action": "store_true",
        "help": "allow the profile to run code: an interpreter, a container, or environment "
        "variables besides the usual ones for tuning",
    },
}  # fmt: skip
"""Arguments of several commands: keywords of ``add_argument`` by name; ``add_shared``."""


def refuse_options(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Reject options that would be passed over in silence.

    Args:
        args: the arguments; an option that is not given is None, False or empty.
        names: the options as attributes of ``args``, such as ``save_config``.
        why: end of the message, such as "is for exports".

    Raises:
        ConfigError: one is given.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False and value not in ("", []):
            raise ConfigError(f"--{name.replace('_', '-')} {why}; remove it")


def prepare_output(option: str, path: str, *, is_folder: bool = False) -> None:
    """Create the folder of a command's output before the work, which may take hours.

    Args:
        option: the option that names the output, for messages.
        path: the file, or folder; empty: none.
        is_folder: it is a folder.

    Raises:
        ConfigError: it cannot be written there.
    """
    if not path:
        return
    output = Path(path)
    if not is_folder and output.exists() and not output.is_file():
        kind = "a folder" if output.is_dir() else "not a regular file"
        raise ConfigError(f"{option} {path} is {kind}; name a file")
    folder = output if is_folder else output.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {folder}: {error.strerror}; choose another") from error
    # The file is replaced, so the system's own links would be, too.
    if not os.access(folder, os.W_OK | os.X_OK) or os.path.abspath(folder) == "/dev":
        raise ConfigError(f"{option} {path}: files in {folder} cannot be written; choose another")


def add_shared(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Declare arguments of ``SHARED``.

    Args:
        parser: of the command, or a group of it.
        names: keys of ``SHARED``.
        changes: replace keywords of ``add_argument``, such as ``help``.
    """
    for name in names:
        # A copy, because a command may change a list that is a default.
        parser.add_argument(name, **copy.deepcopy(SHARED[name]) | changes)


def add_run_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare the run's configuration file and the overrides of its values."""
    add_shared(parser, "config", nargs=None if required else "?")
    add_shared(parser, "overrides")


def add_task_arguments(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Declare task, model, data and overrides; without ``is_required`` only the model is."""
    add_shared(parser, "task", nargs=None if is_required else "?")
    add_shared(parser, "--model")
    add_shared(parser, "--data", required=is_required)
    add_shared(parser, "--tokenizer", "overrides")


def run_folder(run_dir: str) -> Path:
    """Return the folder of a run.

    Raises:
        ConfigError: it does not exist, or no run has begun there.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        hint = did_you_mean(folder) or "; give the run folder (train.run_dir)"
        raise ConfigError(f"{folder}: no such folder{hint}")
    if not any((folder / name).exists() for name in _RUN_FILES):
        raise ConfigError(f"{folder}: no run has begun in this folder; give that of train.run_dir")
    return folder


def with_current_names(arguments: Sequence[str], command: str) -> list[str]:
    """Replace options of a command by the names that they have now, and warn of each."""
    current = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        name = FORMER_OPTIONS.get(f"{command} {option}", FORMER_OPTIONS.get(option, ""))
        if name:
            print(f"megatron-deberta {command}: warning: {option} is now {name}", file=sys.stderr)
        current.append(f"{name or option}{equals}{value}")
    return current


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; without a terminal, tab-separated lines, the columns' names first."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(row))
        return
    # Imported here because --help does not need it.
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, box=SIMPLE)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(escape, row))
    Console(file=sys.stdout, highlight=False).print(table)


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return rows of cells as lines of aligned columns; all but the first ``left`` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def shard_names(args: argparse.Namespace, *, each_once: bool = True) -> list[str]:
    """Return the prefixes of the shards named on the command line."""
    # Imported here because it imports NumPy.
    from megatron_deberta.data.shards.format import shard_prefixes

    return shard_prefixes([*args.prefix, *args.shards], each_once=each_once)
