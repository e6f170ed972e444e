"""Print a script with which bash, zsh or fish completes commands, options, keys and their values.

The script starts megatron-deberta for each completion, so it need not be written again.

Examples:
  megatron-deberta completion bash > ~/.local/share/bash-completion/completions/megatron-deberta
  megatron-deberta completion zsh > ~/.zfunc/_megatron-deberta     (a folder of $fpath)
  megatron-deberta completion fish > ~/.config/fish/completions/megatron-deberta.fish
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.shell_integration import shellcode

from megatron_deberta.cli import main
from megatron_deberta.cli.config import choices, list_keys, packaged_files
from megatron_deberta.cluster.profile import PROFILES
from megatron_deberta.tasks.task import task_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to complete in")


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    print(shellcode(["megatron-deberta"], True, args.shell), end="")


def complete(**options: Any) -> None:
    """Write the completions that the shell asks for in environment variables, and exit.

    Args:
        options: of ``argcomplete.autocomplete``.
    """
    parser = argparse.ArgumentParser("megatron-deberta")
    commands = parser.add_subparsers()
    # Only the command that is typed is imported.
    typed = os.environ["COMP_LINE"].split()[1:2]
    for command in main.COMMANDS:
        each = commands.add_parser(command.name, help=command.help)
        if [command.name] == typed:
            module = main.import_command(command)
            if not hasattr(module, "SUBCOMMANDS"):
                _add_arguments(each, module.add_arguments)
                continue
            forms = each.add_subparsers()
            for name, subcommand in module.SUBCOMMANDS.items():
                _add_arguments(forms.add_parser(name), subcommand.add_arguments)
    argcomplete.autocomplete(parser, always_complete_options=False, **options)


def _add_arguments(
    parser: argparse.ArgumentParser, declare: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Declare a command's arguments with their completers."""
    declare(parser)
    for action in parser._actions:
        if completer := COMPLETERS.get(action.dest):
            action.completer = completer  # type: ignore[attr-defined]
        if not action.option_strings:
            # argparse takes none of them before an option, and then would complete no more.
            action.nargs = {"*": "+", "?": None}.get(str(action.nargs), action.nargs)


def with_files(names: Callable[[], list[str]]) -> Callable[..., list[str]]:
    """Return a completer of these names and of the files that are there."""
    files = FilesCompleter()
    return lambda prefix, **_: [*names(), *files(prefix)]


def override_names(prefix: str, **_: object) -> list[str]:
    """Return the keys of the configuration, or the values of the one that is typed."""
    key, is_assigned, _value = prefix.partition("=")
    if is_assigned:
        return [f"{key}={value}" for value in choices().get(key, ())]
    return [f"{each.name}=" for each in list_keys()]


COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "config": with_files(lambda: packaged_files("configs/runs")),
    "search": with_files(lambda: packaged_files("configs/searches")),
    "task": with_files(task_names),
    "cluster": with_files(lambda: [path.stem for path in PROFILES.glob("*.yaml")]),
    "overrides": override_names,
}
"""Completers by the attribute of an argument; the others take files or one of their choices."""
