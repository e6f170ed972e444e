"""Command-line arguments that several subcommands share, and options under their former names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def add_run_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare the run's configuration file and the overrides of its values."""
    parser.add_argument(
        "config",
        metavar="RUN.yaml",
        nargs=None if required else "?",
        help="configuration of the run",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="replaces a value of the configuration, such as train.steps=1000",
    )


def add_renamed_option(
    parser: argparse.ArgumentParser, name: str, former_name: str, **settings: Any
) -> None:
    """Declare an option whose former name still works, hidden from ``--help``, with a warning.

    Args:
        parser: parser of the subcommand.
        name: the option, such as ``--max-attempts``.
        former_name: its former name.
        settings: of ``add_argument``: a flag's action, or the type, default, metavar and help.
    """
    parser.add_argument(name, **settings)
    former: dict[str, Any] = {"nargs": 0} if settings.get("action") == "store_true" else {}
    if "type" in settings:
        former["type"] = settings["type"]
    parser.add_argument(
        former_name,
        action=_FormerName,
        dest=name.removeprefix("--").replace("-", "_"),
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
        **former,
    )


class _FormerName(argparse.Action):
    """Store an option that was given under its former name, and warn."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        new = "--" + self.dest.replace("_", "-")
        print(f"{parser.prog}: warning: {option_string} is now {new}", file=sys.stderr)
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
