"""Print a shell completion script for commands, options, configuration keys and their values.

Examples:
  megatron-deberta completion bash > ~/.local/share/bash-completion/completions/megatron-deberta
  megatron-deberta completion zsh > ~/.zfunc/_megatron-deberta     (a folder of $fpath)
  megatron-deberta completion fish > ~/.config/fish/completions/megatron-deberta.fish
"""

from __future__ import annotations

import argparse
import shlex
from functools import cache

from megatron_deberta.cli import main
from megatron_deberta.cli.config import choices, list_keys
from megatron_deberta.cluster.profile import PROFILES
from megatron_deberta.config.loader import CONFIG_ROOTS
from megatron_deberta.errors import EXIT_DONE
from megatron_deberta.tasks.task import task_names

_FOLDERS = {"config": "configs/runs", "search": "configs/searches"}
"""Folders of packaged files, by the positional argument that names them."""

_BASH = """\
_megatron_deberta() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} key=${{COMP_WORDS[COMP_CWORD-1]}}
  local flags= keys= values= names=
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  # The shell makes a word of its own of "=".
  if [[ $word == "=" ]]; then word=
  elif [[ $key == "=" ]]; then key=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  case ${{COMP_WORDS[1]}}:${{keys:+key}}:$key in
{values}
  esac
  if [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
    if ((!${{#COMPREPLY[@]}})); then compopt -o default; fi
  elif [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  else
    COMPREPLY=($(compgen -W "$keys" -- "$word"))
    if ((${{#COMPREPLY[@]}})); then compopt -o nospace; fi
    if [[ -n $(compgen -W "$names" -- "$word") ]]; then
      COMPREPLY+=($( (compgen -W "$names" -- "$word"; compgen -f -- "$word") | sort -u))
    fi
    if ((!${{#COMPREPLY[@]}})); then compopt -o default; fi
  fi
}}
complete -F _megatron_deberta megatron-deberta
"""
_ZSH = """\
#compdef megatron-deberta
local flags keys values names key=$words[CURRENT-1]
if ((CURRENT == 2)); then
  compadd -- {commands}
  return
fi
case $words[2] in
{cases}
esac
if [[ $PREFIX == *=* ]]; then key=${{PREFIX%%=*}}; fi
case $words[2]:${{keys:+key}}:$key in
{values}
esac
if [[ -n $values ]]; then
  compset -P '*='
  compadd -- ${{=values}}
elif [[ $PREFIX == -* ]]; then
  compadd -- ${{=flags}}
else
  _files
  compadd -- ${{=names}}
  compadd -S '' -- ${{=keys}}
fi
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to complete in")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(fish_script() if args.shell == "fish" else script(args.shell), end="")
    return EXIT_DONE


def parsers() -> dict[main.Command, argparse.ArgumentParser]:
    """Return the parser of every command."""
    return {
        command: main.build_parser(command, main.import_command(command))
        for command in main.COMMANDS
    }


def options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a command."""
    names = [name for action in parser._actions for name in action.option_strings]
    return [name for name in names if name.startswith("--")]


def takes_keys(parser: argparse.ArgumentParser) -> bool:
    """Return whether a command takes ``section.key=value``."""
    return any(action.dest == "overrides" for action in parser._actions)


@cache
def packaged(folder: str) -> tuple[str, ...]:
    """Return the names of packaged files, such as ``configs/runs/small.yaml``."""
    for root in CONFIG_ROOTS:
        if found := sorted((root / folder).glob("*.yaml")):
            return tuple(f"{folder}/{path.name}" for path in found)
    return ()


def names(parser: argparse.ArgumentParser) -> list[str]:
    """Return what a command's positional arguments can name: configs, searches and tasks."""
    given = {action.dest for action in parser._actions if not action.option_strings}
    found = [
        name for dest, folder in _FOLDERS.items() if dest in given for name in packaged(folder)
    ]
    return [*found, *(task_names() if "task" in given else [])]


def option_values(action: argparse.Action) -> list[str]:
    """Return what an option can name; empty: not known."""
    if action.choices:
        return list(map(str, action.choices))
    if action.dest == "cluster":
        return sorted(path.stem for path in PROFILES.glob("*.yaml"))
    return task_names() if action.dest == "task" else []


def _keys() -> str:
    return " ".join(f"{key.name}=" for key in list_keys())


def _value_cases() -> str:
    """Return the cases of options and configuration keys that take one of a few values."""
    cases = {f"*:key:{key}": values for key, values in choices().items()}
    for command, parser in parsers().items():
        for action in parser._actions:
            for name in action.option_strings:
                if values := option_values(action):
                    cases[f"{command.name}:*:{name}"] = values
    return "\n".join(
        f"    {case}) values={shlex.quote(' '.join(values))} ;;" for case, values in cases.items()
    )


def script(shell: str) -> str:
    """Return the script for bash or zsh."""
    cases = "\n".join(
        f"    {command.name}) flags={shlex.quote(' '.join(options(parser)))}"
        f"{' keys=' + shlex.quote(_keys()) if takes_keys(parser) else ''}"
        f"{' names=' + shlex.quote(' '.join(names(parser))) if names(parser) else ''} ;;"
        for command, parser in parsers().items()
    )
    commands = " ".join(command.name for command in main.COMMANDS)
    return (_BASH if shell == "bash" else _ZSH).format(
        commands=commands, cases=cases, values=_value_cases()
    )


def fish_script() -> str:
    """Return the script for fish."""
    lines = []
    for command, parser in parsers().items():
        lines.append(
            f"-n __fish_use_subcommand -f -a {command.name} -d {shlex.quote(command.help)}"
        )
        seen = f"-n '__fish_seen_subcommand_from {command.name}'"
        for action in parser._actions:
            flags = [name for name in action.option_strings if name.startswith("--")]
            text = (action.help or "").partition(";")[0].partition(" (")[0]
            values = shlex.quote(" ".join(option_values(action)))
            taken = f" -x -a {values}" if action.choices else f" -r -a {values}"
            taken = taken if option_values(action) else ""
            lines += [f"{seen} -l {name[2:]} -d {shlex.quote(text)}{taken}" for name in flags]
        if names(parser):
            lines.append(f"{seen} -a {shlex.quote(' '.join(names(parser)))}")
        if takes_keys(parser):
            pairs = [f"{key}={value}" for key, values in choices().items() for value in values]
            lines.append(f"{seen} -a {shlex.quote(' '.join([_keys(), *pairs]))}")
    return "".join(f"complete -c megatron-deberta {line}\n" for line in lines)
