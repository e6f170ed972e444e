"""Commands that are run several times in a test, with further options each time."""

from __future__ import annotations

import pytest

from megatron_deberta.cli.main import main


class Command:
    """A command and its usual arguments.

    Args:
        capsys: captures what it prints.
        arguments: of every call.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        """See the class."""
        self._capsys = capsys
        self._arguments = arguments

    def __call__(self, *options: str) -> str:
        """Run it with further options, which succeeds; return its output."""
        return self._run(0, *options)[0]

    def errors(self, code: int, *options: str) -> str:
        """Run it with further options, which ends with this exit code; return its error output."""
        return self._run(code, *options)[1]

    def with_options(self, *options: str) -> Command:
        """Return the command with further usual arguments."""
        return Command(self._capsys, *self._arguments, *options)

    def _run(self, code: int, *options: str) -> tuple[str, str]:
        self._capsys.readouterr()
        assert main([*self._arguments, *options]) == code
        out, err = self._capsys.readouterr()
        return out, err
