"""SLURM's commands, called with argument lists (never through a shell), and what may be in them.

A string on a command line matches one of the patterns here; others are errors, never escaped.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from megatron_deberta.errors import ConfigError, MegatronDebertaError

TIMEOUT_SECONDS = 60.0
NOT_QUEUED = "not queued"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,255}(,+[A-Za-z0-9][A-Za-z0-9_.-]{0,255})*,*")
"""Nodes or partitions, of which there may be any number."""
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,31}")
ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[af]?")
BUILD = re.compile(r"[a-z]+[0-9.]*")
PATH = re.compile(r"/[\w./@+=,:~ -]*")
"""No ``%`` and no backslash: SLURM expands them in names of log files."""
IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_./:@+#-]*")
MOUNT = re.compile(r"/[\w./@+=~-]*:/[\w./@+=~-]*(:(ro|rw))?")
OPTION = re.compile(r"--[a-z-]+=[\w.,:;/@+&|*()\[\]=-]{1,1024}")
"""A long option with its value."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
"""Environment variables."""
VALUE = re.compile(r"[^\x00-\x1f\x7f]{0,4096}")


class SlurmError(MegatronDebertaError):
    """A SLURM command is missing, failed or timed out."""


def call(command: Sequence[str]) -> str:
    """Run a SLURM command and return its standard output.

    Raises:
        SlurmError: it is not installed, failed, or timed out.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not installed here; run this on a node of the SLURM cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: no answer within {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise SlurmError(f"{command[0]}: {reason}")
    return done.stdout


def queue_entry(job: str) -> str:
    """Return a job's state and the reason for it, empty if it is neither queued nor running.

    Raises:
        SlurmError: SLURM does not answer.
    """
    try:
        return call(["squeue", "--noheader", "--jobs", job, "--format=%T %r"]).strip()
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return ""
        raise


def queue_state(jobs: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return SLURM's state of the job that runs, or else of the first pending one, and all jobs."""
    found = {}
    for job in jobs:
        try:
            line = queue_entry(job)
        except SlurmError as error:
            return f"unknown ({error})", ()
        if line:
            state, _, reason = line.partition(" ")
            found[job] = f"{state} ({reason})" if state == "PENDING" else state
    running = [state for state in found.values() if not state.startswith("PENDING")]
    return next(iter([*running, *found.values()]), NOT_QUEUED), tuple(found)


def current_job(variables: Mapping[str, str]) -> str:
    """Return the number of the job to which a process belongs, empty outside SLURM.

    For an element of a job array this is ``ARRAY_INDEX``: the array's number, which is also
    ``SLURM_JOB_ID`` of one of its elements, stands for all of them in commands.
    """
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return variables.get("SLURM_JOB_ID", "")


def queued_jobs() -> set[str]:
    """Return the user's jobs that are queued or running, elements of arrays as ``ARRAY_INDEX``.

    Raises:
        SlurmError: ``squeue`` failed.
    """
    return set(call(["squeue", "--noheader", "--array", "--me", "--format=%i"]).split())


def job_has_ended(job: str) -> bool:
    """Return whether SLURM reports that a job no longer runs; False without SLURM."""
    try:
        return not queue_entry(job)
    except SlurmError:
        return False


def job_info(job: str) -> dict[str, str]:
    """Return the fields of ``scontrol show job``; empty if SLURM does not answer."""
    try:
        text = call(["scontrol", "--oneliner", "show", "job", job])
    except SlurmError:
        return {}
    return dict(item.split("=", 1) for item in text.split() if "=" in item)


def usable_nodes(partition: str) -> list[str]:
    """Return the nodes of a partition that can run jobs now or soon.

    Raises:
        SlurmError: ``sinfo`` failed.
    """
    text = call(["sinfo", "--noheader", "-N", f"--partition={partition}", "--format=%N %t"])
    pairs = (line.split() for line in text.splitlines())
    out = ("down", "drain", "drng", "fail", "unk", "maint", "boot", "resv")
    return [name for name, state in pairs if not state.startswith(out) and state[-1] != "*"]


def cancel_pending(job: str) -> None:
    """Cancel a job if it is still pending.

    Raises:
        SlurmError: SLURM rejects it.
    """
    try:
        call(["scancel", "--state=PENDING", job])
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise


def checked(text: str, pattern: re.Pattern[str], key: str) -> str:
    """Return the text if the whole of it matches the pattern.

    Args:
        text: the value.
        pattern: what it must match.
        key: name of the value, for the message.

    Raises:
        ConfigError: it does not.
    """
    if not pattern.fullmatch(text):
        raise ConfigError(f"{key}={text!r} is not allowed; it must match {pattern.pattern}")
    return text
