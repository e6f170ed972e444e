"""Error types and exit codes.

Every message is one line with the key, the offending value and the remedy. The command line prints
it without a traceback (unless ``--debug``) and exits with ``exit_code``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_REQUEUE = 75
"""Stopped by a signal, with a checkpoint or before the first step: requeue the job."""
EXIT_NEVER_REQUEUE = 93
"""Running again would fail at the same step in the same way."""
EXIT_INTERRUPTED = 130
"""Stopped by the user (SIGINT, Ctrl-C); a shell's exit code for it."""
_LASTING_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


class MegatronDebertaError(Exception):
    """Base of the errors that a user can fix."""

    exit_code = EXIT_FAILURE


class ConfigError(MegatronDebertaError):
    """A configuration or command-line value is wrong."""

    exit_code = EXIT_USAGE


class DataError(MegatronDebertaError):
    """Text, shards or a tokenizer are missing, damaged or inconsistent."""


class MissingInputError(DataError):
    """A file or folder that was named does not exist or cannot be opened."""

    exit_code = EXIT_USAGE


class MalformedInputError(DataError):
    """A file that the user named is not of the expected format, or has no content."""

    exit_code = EXIT_USAGE


class ModelInputError(DataError, ValueError):
    """A tensor that was passed to a model has a wrong shape, or values out of range."""


class TopologyError(MegatronDebertaError):
    """Ranks, process groups and parallel sizes are inconsistent."""

    exit_code = EXIT_USAGE


class RendezvousError(MegatronDebertaError):
    """The ranks of a job cannot connect to each other."""


class CheckpointError(MegatronDebertaError):
    """A checkpoint is missing, damaged, or from another model."""


class MissingModelError(CheckpointError):
    """The folder that was named does not exist, or holds no model of the kind that is needed."""

    exit_code = EXIT_USAGE


class NumericsError(MegatronDebertaError):
    """Losses or gradients are not finite, or spike, and skipping steps did not help.

    Steps are deterministic, so a restart from the checkpoint would fail again.
    """

    exit_code = EXIT_NEVER_REQUEUE


class LossScaleError(NumericsError):
    """Gradients overflow fp16 at the smallest allowed loss scale."""


class ReplicaError(MegatronDebertaError):
    """Ranks hold or compute different values, because of faulty computation or memory.

    Args:
        message: see the module.
        differing: ranks whose replicas differ from the majority, by parameter.
    """

    def __init__(self, message: str, differing: Mapping[str, tuple[int, ...]] | None = None):
        super().__init__(message)
        self.differing = differing or {}


def describe_error(error: object = None) -> str:
    """Return an exception's kind and text in one line of at most 300 characters; empty: None."""
    return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:300]


def printable(text: str) -> str:
    """Replace characters that control a terminal or cannot be printed, except for newlines.

    File names, configs and logs of other people reach messages.
    """
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


@contextmanager
def refusals() -> Iterator[None]:
    """Set the exit code of errors that a restart would only repeat to that of a usage error.

    For work before the first step. A failing file system may recover, so its errors keep theirs.
    """
    try:
        yield
    except (CheckpointError, DataError) as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or isinstance(cause, _LASTING_ERRORS):
            error.exit_code = EXIT_USAGE
        raise
