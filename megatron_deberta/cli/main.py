"""Entry point of ``megatron-deberta``: runs a subcommand; errors become one line and an exit code.

Each subcommand is a module of this package with ``add_arguments(parser)`` and ``run(args)``, which
returns the exit code, or None for 0; or with ``SUBCOMMANDS``, which have these two each. It is
imported only when it is called, so that ``--help`` does not import torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import select
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from megatron_deberta import __version__
from megatron_deberta.cli.arguments import (
    CommandParser,
    HelpFormatter,
    Subcommand,
    with_current_names,
)
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    MegatronDebertaError,
    printable,
)

# Exit code of a shell for a command ended by SIGPIPE.
EXIT_PIPE_CLOSED = 141
_DASK_LOGGERS = ("distributed.client", "distributed.utils", "tornado.application")


class Command(NamedTuple):
    """A subcommand: its name, after which its module is called, and its summary."""

    name: str
    help: str


class Group(NamedTuple):
    """Subcommands for one purpose, and the extra of the package that they need."""

    title: str
    extra: str
    commands: tuple[Command, ...]


GROUPS = (
    Group("text", "text", (
        Command("train-tokenizer", "train a SentencePiece tokenizer on text"),
        Command("deduplicate", "remove exact and near duplicates from a corpus"),
        Command("split", "split a corpus into training and validation documents"),
        Command("preprocess", "tokenize text into memory-mapped shards"),
        Command("inspect", "show training samples with masks, or statistics of shards"),
        Command("merge", "merge several shards into one"),
        Command("index", "build the indices of a run on many documents before it starts"),
        Command("verify", "check shards for damage"),
    )),
    Group("pretraining", "train", (
        Command("plan", "predict memory, FLOPs, traffic and time of a run on a cluster"),
        Command("config", "list the configuration keys, or print a run's resolved configuration"),
        Command("doctor", "check the installation, or whether a run can start here"),
        Command("pretrain", "pretrain, as one rank of a run or alone"),
        Command("launch", "pretrain with several ranks on this machine"),
        Command("report", "write an HTML report of one run, or of several compared"),
    )),
    Group("SLURM", "train", (
        Command("submit", "submit a run to a SLURM cluster"),
        Command("status", "show queue, progress and job attempts of a run"),
        Command("logs", "print or follow a rank's log"),
        Command("cancel", "cancel the jobs of a run"),
    )),
    Group("fine-tuning", "finetune", (
        Command("finetune", "fine-tune a model on a labelled task"),
        Command("predict", "predict the examples of a task with a fine-tuned model"),
        Command("evaluate", "compute a task's metrics, BLiMP accuracies, or a text's perplexity"),
        Command("finetune-checkpoints", "score of a task against pretraining steps"),
        Command("search", "search hyper-parameters of a task over a grid and seeds"),
        Command("compare", "test whether two models differ on a task, over examples and seeds"),
        Command("ensemble", "average the predictions of the best of several fine-tuned runs"),
    )),
    Group("using a model", "train", (
        Command("convert", "export to Hugging Face format, or import a published model"),
        Command("fill-mask", "predict the [MASK] tokens of a text"),
        Command("generate", "continue a text with an autoregressive model"),
        Command("attention", "draw the attention maps of a text, split by terms of the scores"),
        Command("completion", "print a completion script for bash, zsh or fish"),
    )),
)  # fmt: skip
COMMANDS = tuple(command for group in GROUPS for command in group.commands)


def import_command(command: Command) -> ModuleType:
    """Import the module behind a subcommand."""
    return importlib.import_module(f"megatron_deberta.cli.{command.name.replace('-', '_')}")


def build_overview() -> argparse.ArgumentParser:
    """Build the parser of ``megatron-deberta`` itself."""
    width = max(len(command.name) for command in COMMANDS)
    table = "\n\n".join(
        "\n".join([f"{group.title}:", *(f"  {name:<{width}}  {text}" for name, text in commands)])
        for group in GROUPS
        for commands in [group.commands]
    )
    parser = argparse.ArgumentParser(
        prog="megatron-deberta",
        description="Pretrain DeBERTa with tensor parallelism and DeepSpeed ZeRO.",
        epilog=f"{table}\n\nmegatron-deberta COMMAND --help describes a command, with examples. "
        "Start with train-tokenizer.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-deberta {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    parser.add_argument("command", type=command_name, metavar="COMMAND")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    # Otherwise argparse names it when COMMAND is missing.
    rest.required = False
    return parser


def command_name(text: str) -> str:
    """Return a command's name as it was typed.

    Raises:
        argparse.ArgumentTypeError: there is no such command.
    """
    names = [command.name for command in COMMANDS]
    if text in names:
        return text
    similar = difflib.get_close_matches(text, names, 1)
    hint = f"did you mean {similar[0]}?" if similar else "--help lists them"
    raise argparse.ArgumentTypeError(f"there is no command {text!r}; {hint}")


def build_parser(command: Command, module: ModuleType) -> argparse.ArgumentParser:
    """Build a command's parser; if it has subcommands, the parser only takes the name of one."""
    text = module.__doc__ or command.help
    subcommands: Mapping[str, Subcommand] = getattr(module, "SUBCOMMANDS", {})
    if not subcommands:
        return _new_parser(command.name, text, module.add_arguments)
    width = max(map(len, subcommands))
    names = (f"  {name:<{width}}  {each.text.split('.')[0]}" for name, each in subcommands.items())

    def add_name(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "subcommand", choices=list(subcommands), metavar="SUBCOMMAND",
            help=f"{', '.join(subcommands)}; each has its own --help",
        )  # fmt: skip

    first, _, rest = text.partition("\n")
    return _new_parser(command.name, "\n".join([first, "", *names, rest]), add_name)


def _new_parser(
    name: str, text: str, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> argparse.ArgumentParser:
    """Build a parser whose description and epilog are the first line of a text and the rest."""
    lines = text.strip().splitlines()
    parser = CommandParser(
        prog=f"megatron-deberta {name}",
        description=lines[0],
        epilog="\n".join(lines[1:]).strip("\n") or None,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    add_arguments(parser)
    return parser


def command_parsers(command: Command, module: ModuleType) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's subcommands by name; else its own, with an empty name."""
    subcommands: Mapping[str, Subcommand] = getattr(module, "SUBCOMMANDS", {})
    return {
        name: _new_parser(f"{command.name} {name}", each.text, each.add_arguments)
        for name, each in subcommands.items()
    } or {"": build_parser(command, module)}


def _choose(
    command: Command, module: ModuleType, arguments: list[str]
) -> tuple[Callable[[argparse.Namespace], int | None], argparse.ArgumentParser, list[str]]:
    """Return the function and the parser for these arguments, and the arguments to parse."""
    subcommands: Mapping[str, Subcommand] = getattr(module, "SUBCOMMANDS", {})
    if not subcommands:
        return module.run, build_parser(command, module), arguments
    default: str | None = getattr(module, "FORMER_SUBCOMMAND", None)
    if arguments[:1] == ["--debug"]:
        arguments = [*arguments[1:], "--debug"]
    name, *rest = arguments or [""]
    if name not in subcommands and default and name not in ("", "-h", "--help", "--debug"):
        print(
            f"megatron-deberta {command.name}: warning: write {command.name} {default} "
            f"{shlex.join(arguments)}",
            file=sys.stderr,
        )
        name, rest = default, arguments
    elif name not in subcommands:
        # Shows the help, or raises.
        build_parser(command, module).parse_args(arguments)
    return subcommands[name].run, command_parsers(command, module)[name], rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``megatron-deberta`` and return its exit code.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The subcommand's exit code, or the error's (see ``megatron_deberta.errors``).

    Raises:
        SystemExit: on ``--help``, ``--version`` (0) and an unknown command (2), as argparse does.
    """
    if "_ARGCOMPLETE" in os.environ:
        from megatron_deberta.cli.completion import complete

        complete()
    if argv is None:
        _use_utf8()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Text of any language is shown; a terminal or pipe may have another encoding.
        sys.stdout.reconfigure(errors="replace")
    overview = build_overview().parse_args(argv)
    command = next(entry for entry in COMMANDS if entry.name == overview.command)
    debug: bool = overview.debug
    try:
        module = import_command(command)
        arguments = with_current_names(overview.arguments, command.name)
        run, parser, arguments = _choose(command, module, arguments)
        args = parser.parse_intermixed_args(arguments)
        debug = debug or args.debug
        if not debug:
            # Dask's client logs a traceback per lost connection; the commands report one line.
            os.environ.setdefault("DASK_LOGGING", str(dict.fromkeys(_DASK_LOGGERS, "critical")))
        return run(args) or EXIT_DONE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (MegatronDebertaError, OSError, UnicodeEncodeError, ModuleNotFoundError) as error:
        if isinstance(error, BrokenPipeError) and stdout_is_closed():
            return EXIT_PIPE_CLOSED
        text, code = explain(error, command, overview.arguments)
        if debug:
            traceback.print_exc()
        print(f"megatron-deberta: error: {text}", file=sys.stderr)
        return code


def explain(error: Exception, command: Command, arguments: Sequence[str] = ()) -> tuple[str, int]:
    """Return an error as one line, and the exit code.

    Args:
        error: the error.
        command: the subcommand.
        arguments: its arguments.

    Raises:
        ModuleNotFoundError: ``error``, if a module of this package is missing.
    """
    if isinstance(error, UnicodeEncodeError):
        text = printable(error.object[error.start : error.end])
        return (
            f"{text!a} cannot be written in {error.encoding}, the encoding of this environment; "
            "set PYTHONUTF8=1, or LC_ALL to a locale with UTF-8"
        ), EXIT_USAGE
    if isinstance(error, ModuleNotFoundError):
        if error.name is None or error.name.split(".")[0] == "megatron_deberta":
            raise error
        extra = next(group.extra for group in GROUPS if command in group.commands)
        if command.name == "convert" and "onnx" in arguments:
            extra = "onnx" if {"--from", "hf"} <= set(arguments) else f"{extra},onnx"
        install = f"pip install 'megatron-deberta[{extra}]'"
        return f"{command.name} needs the package {error.name}; {install}", EXIT_USAGE
    if isinstance(error, MegatronDebertaError):
        return describe(error), error.exit_code
    assert isinstance(error, OSError)
    # A file where a folder is wanted, or the other way round, which no restart changes
    is_lasting = isinstance(error, NotADirectoryError | IsADirectoryError)
    return describe(error), EXIT_USAGE if is_lasting else EXIT_FAILURE


def _use_utf8() -> None:
    """Start this process again in UTF-8 mode if names of files would be ASCII.

    This is so with ``LC_ALL=C PYTHONUTF8=0``; arguments and paths in any language then fail.
    """
    flags = sys.flags
    is_possible = not flags.ignore_environment and "utf8" not in sys._xoptions
    if sys.getfilesystemencoding() == "ascii" and is_possible and not flags.utf8_mode:
        arguments = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, "PYTHONUTF8": "1"})


def stdout_is_closed() -> bool:
    """Return whether the reader of the output (``head``, a pager) has exited."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    # Python flushes at exit, which would fail.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def describe(error: MegatronDebertaError | OSError) -> str:
    """Format an error as one line; an OSError as ``file: reason``."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    return printable(" ".join(text.split()))
