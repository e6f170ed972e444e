"""The error types users see, and the exit codes that go with them.

Every message names the key, the offending value and the remedy, on one line. The command line
prints it without a traceback (unless ``--debug``) and exits with ``exit_code``.
"""

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_REQUEUE = 75
"""Stopped at a safe point with a committed checkpoint: requeue the job."""
EXIT_NEVER_REQUEUE = 93
"""Running again cannot help: it would end at the same step in the same way."""


class MegatronDebertaError(Exception):
    """Base of the errors that are the user's to fix."""

    exit_code = EXIT_FAILURE


class ConfigError(MegatronDebertaError):
    """A configuration or command-line value is wrong."""

    exit_code = EXIT_USAGE


class DataError(MegatronDebertaError):
    """Text, shards or a tokenizer are missing, damaged or do not fit together."""


class TopologyError(MegatronDebertaError):
    """Ranks, process groups and parallel sizes do not fit together."""

    exit_code = EXIT_USAGE


class CheckpointError(MegatronDebertaError):
    """A checkpoint is missing, damaged, or of another model."""


class NumericsError(MegatronDebertaError):
    """Losses or gradients are not finite, or spike, and skipping steps did not help.

    Steps are deterministic, so starting again from the checkpoint would meet it again.
    """

    exit_code = EXIT_NEVER_REQUEUE


class LossScaleError(NumericsError):
    """Gradients overflow fp16 at the smallest loss scale allowed."""


class ReplicaError(MegatronDebertaError):
    """What must be equal on several ranks is not: a rank computes or remembers wrongly."""
