"""Stop and kill searches, comparisons and ensembles, start them again, and compare all results.

A case stops (SIGTERM, SIGINT) or kills (SIGKILL) ``search``, ``compare`` or ``ensemble`` at a
random time, after a random step of the search's runs, or while it renames a file to its final name
(``strace`` sends the signal). All its processes must be gone soon, and no file under a final name
may be half-written. The same command, started again, must print and leave what an unbroken one
does, byte for byte, and no file more.

Each case is determined by its number and appends one JSON line to the output; cases that are there
for the same code are skipped, so the campaign can be interrupted.

  python -m tests.faults.search_kills                  all missing cases
  python -m tests.faults.search_kills --seconds 600    as many as fit
  python -m tests.faults.search_kills --only 7         repeat one case
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.lib.provenance import program_environment
from benchmarks.tables.faults import SEARCH_KILLS_CODE
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE, MegatronDebertaError
from tests.faults import campaign
from tests.support.jobs import recorded_steps
from tests.support.tiny_task import MODEL, write_task

CASES = 60
KINDS = ("search", "compare", "search", "ensemble")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
MOMENTS = {
    "search": ("time", "step", "write"), "compare": ("time", "write"),
    "ensemble": ("write", "time"),
}  # fmt: skip
WRITES = {"search": 15, "compare": 7, "ensemble": 10}
"""Files and folders that the command itself, not a run of it, renames to their final names."""
RATES, SEEDS, STEPS = (3e-3, 1e-3), 2, 8
RUNS = len(RATES) * SEEDS
GRID = {
    "optimizer.learning_rate": RATES, "optimizer.warmup_steps": 0, "train.steps": STEPS,
    "train.eval_every": 3, "train.global_batch_size": 8, "train.device": "cpu",
    "checkpoint.save_every": 2, "parallel.engine": "plain", "log.every": 1,
    "log.tensorboard": False,
}  # fmt: skip
ONE_RUN = f"cells/learning_rate={RATES[1]}/seed_1"
VARYING: dict[str, tuple[str, ...]] = {
    r".*/lock/\d{8}\.json": (),
    r".*/(search\.log|timeline\.jsonl|loss\.png)": (),
    r".*/metrics\.jsonl": (
        "tokens_per_second", "utilization", "hardware_utilization", "flops_per_second",
        "matmul_flops_per_second", "seconds_left",
    ),
}  # fmt: skip
"""Files of runs that may differ: the lock's holder, the log, the timeline, in the metrics these
keys, and the picture of the losses, which is missing if a run was killed between its last
validation and its end: it is not started again. Records of checkpoints are left out, too: they have
durations, and an interrupted run saves other ones."""
TEMPORARY = re.compile(r"\.tmp(/|$)|(^|/)\.(?!lock$)")
CODES = {
    "SIGKILL": (-signal.SIGKILL,), "SIGTERM": (-signal.SIGTERM, EXIT_REQUEUE),
    "SIGINT": (-signal.SIGINT, EXIT_INTERRUPTED),
}  # fmt: skip
GONE_SECONDS = 1.0
"""Maximum time from the death of the command to that of its last process."""
TIMEOUT_SECONDS = 300.0
PRINTED = "standard output"


class Unbroken(NamedTuple):
    """What an uninterrupted command leaves and prints, and its duration."""

    state: dict[str, str]
    seconds: float


def plan_case(number: int) -> dict[str, Any]:
    """Choose the command, the signal and the moment."""
    rng = random.Random(f"search kills {number}")
    place = number % len(KINDS)
    kind = KINDS[place]
    turn = number // len(KINDS) * KINDS.count(kind) + KINDS[:place].count(kind)
    moment = MOMENTS[kind][turn // len(SIGNALS) % len(MOMENTS[kind])]
    plan = {
        "kind": kind, "signal": SIGNALS[turn % len(SIGNALS)], "moment": moment,
        # Of the command's time, of the steps of all runs, or of the writes.
        "fraction": round(rng.uniform(0.03, 0.97), 3),
        # Runs at a time.
        "jobs": rng.choice((1, 2)) if kind == "search" else None, "again_seconds": None,
    }  # fmt: skip
    can_wait = kind == "search" and moment != "write" and plan["signal"] != "SIGKILL"
    if can_wait and rng.random() < 0.5:
        # The second signal ends a search at once.
        plan["again_seconds"] = round(rng.uniform(0.0, 1.0), 3)
    return plan


def processes(text: str) -> list[psutil.Process]:
    """Return the processes with a text in their command line."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if text in " ".join(each.info["cmdline"] or ())]


def wait(process: psutil.Process, seconds: float) -> int | None:
    """Return the exit code, negative for a signal; None if the process still runs after a time."""
    try:
        return int(process.wait(seconds))
    except psutil.TimeoutExpired:
        return None


def complete_lines(content: bytes) -> list[bytes]:
    """Return the lines of an appended file; the kernel may cut the last one of a killed process."""
    return content[: content.rfind(b"\n") + 1].splitlines()


def state(folder: Path) -> dict[str, str]:
    """Return the digest of every file by name, without what is ``VARYING``; folders have none."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        keys = next((keys for each, keys in VARYING.items() if re.fullmatch(each, name)), None)
        content = b"" if path.is_dir() else path.read_bytes()
        if keys:
            # Damaged lines differ from any others.
            with contextlib.suppress(ValueError):
                records = [json.loads(line) for line in complete_lines(content)]
                kept = [record for record in records if record["kind"] != "checkpoint"]
                kept = [{k: v for k, v in record.items() if k not in keys} for record in kept]
                content = json.dumps(kept).encode()
        if keys != ():
            found[name] = "" if path.is_dir() else hashlib.sha256(content).hexdigest()
    return found


def check_whole(path: Path) -> None:
    """Check that a file of an interrupted search, of which there are several states, is complete.

    Raises:
        ValueError, OSError, MegatronDebertaError: it is not, or there is one state only.
    """
    content = path.read_bytes()
    if path.name == "results.json":
        counts = [(each["finished"], len(each["scores"])) for each in json.loads(content)["cells"]]
        if len(counts) != len(RATES) or any(finished != scores for finished, scores in counts):
            raise ValueError(f"finished runs and scores of the cells: {counts}")
    elif path.name in ("best.json", "manifest.json"):
        json.loads(content)
    elif path.suffix == ".jsonl":
        for line in complete_lines(content):
            json.loads(line)
    elif path.name == "COMMITTED":
        CheckpointReader(path.parent).verify()
    elif path.name == "results.csv" and content.count(b"\n") != 1 + len(RATES):
        raise ValueError("lines are missing")
    elif path.suffix not in (".csv", ".safetensors"):
        raise ValueError("not the file of the unbroken command")


class SearchKills:
    """Interrupts commands on one tiny task and model, and compares their results.

    Args:
        folder: working folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        """The finished search, of which comparisons and ensembles get a copy."""
        # Paths are in the results, so all commands use the same.
        self._work = folder / "work"
        self._unbroken: dict[str, Unbroken] = {}
        data = write_task(folder / "data")
        values = {
            "task": str(data / "task.yaml"), "model": str(MODEL), "data": str(data),
            "seeds": SEEDS, "output": str(self._work / "out"), "grid": GRID,
        }  # fmt: skip
        (folder / "search.yaml").write_text(json.dumps(values))

    def run(self, case: int) -> dict[str, Any]:
        """Interrupt a command, start it again and compare; return the case's result."""
        plan, begin = plan_case(case), time.monotonic()
        expected = self.unbroken(plan["kind"]).state
        hit, attempts = self._interrupt(plan, plan["fraction"]), 1
        while self._results() == expected and not hit["outlived"] and attempts < 10:
            # All was done before the signal; an earlier moment interrupts something.
            hit = self._interrupt(plan, plan["fraction"] * 0.7**attempts)
            attempts += 1
        stopped = state(self._work)
        half_written = self._half_written(plan["kind"], stopped, expected)
        code = wait(self.start(self._arguments(plan)), TIMEOUT_SECONDS)
        found = self._results()
        line = {
            **plan, **hit, "attempts": attempts, "half_written": half_written,
            "temporary": [name for name in stopped if TEMPORARY.search(name)],
            "code_again": code, "left_over": sorted(found.keys() - expected.keys()),
            "missing": sorted(expected.keys() - found.keys()),
            "differing": sorted(n for n in expected if found.get(n, expected[n]) != expected[n]),
            "seconds": round(time.monotonic() - begin, 1),
        }  # fmt: skip
        line["ok"] = (
            hit["code"] in CODES[plan["signal"]] and not hit["outlived"] and code == EXIT_DONE
            and not (half_written or line["left_over"] or line["missing"] or line["differing"])
        )  # fmt: skip
        if not line["ok"]:
            line["log"] = self._last_lines()
        return line

    def unbroken(self, kind: str) -> Unbroken:
        """Run a command without interruption, once; return its results."""
        if kind not in self._unbroken:
            if kind != "search":
                self.make_runs()
            self._reset(kind)
            begin = time.monotonic()
            code = wait(self.start(self._arguments({"kind": kind, "jobs": 1})), TIMEOUT_SECONDS)
            assert code == EXIT_DONE, self._last_lines()
            self._unbroken[kind] = Unbroken(self._results(), time.monotonic() - begin)
            if kind == "search":
                shutil.copytree(self._work / "out", self.runs)
        return self._unbroken[kind]

    def make_runs(self) -> None:
        """Run the search whose runs are compared, unless it has been run."""
        self.unbroken("search")

    def start(self, arguments: Sequence[str], *before: str) -> psutil.Process:
        """Start a command; ``before`` is a program that starts it."""
        line = [*before, sys.executable, "-m", "megatron_deberta", *arguments]
        with (self.folder / PRINTED).open("wb") as out, (self.folder / "errors").open("wb") as err:
            return psutil.Popen(
                # Otherwise a run has fewer threads, and other rounding, beside others than alone.
                line, cwd=self.folder, env=program_environment(OMP_NUM_THREADS="1"),
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                # A shell's background jobs ignore it.
                preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def _arguments(self, plan: dict[str, Any]) -> list[str]:
        """Return the arguments of a case's command."""
        out = str(self._work / "out")
        if plan["kind"] == "search":
            return ["search", str(self.folder / "search.yaml"), "--jobs", str(plan["jobs"])]
        if plan["kind"] == "compare":
            output = str(self._work / "compare.json")
            return ["compare", out, f"{out}/{ONE_RUN}", "--output", output, "--resamples", "200"]
        return ["ensemble", out, "--best", "2", "--output", str(self._work / "test.jsonl")]

    def _reset(self, kind: str) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        if kind != "search":
            shutil.copytree(self.runs, self._work / "out")

    def _results(self) -> dict[str, str]:
        """Return the digests of all files, and what was printed."""
        return state(self._work) | {PRINTED: (self.folder / PRINTED).read_text()}

    def _run_folders(self) -> list[Path]:
        return sorted(self._work.glob("out/cells/*/seed_*"))

    def _interrupt(self, plan: dict[str, Any], fraction: float) -> dict[str, Any]:
        """Start a command, and send it the signal; return when and how it ended."""
        kind, seconds = plan["kind"], self.unbroken(plan["kind"]).seconds
        number, log = signal.Signals[plan["signal"]], self.folder / "strace.log"
        write = 1 + int(fraction * WRITES[kind])
        strace = (
            "strace", "-D", "-qq", "-o", str(log), "-e", "trace=/^rename",
            "-e", f"inject=/^rename:signal={plan['signal']}:when={write}",
        )  # fmt: skip
        self._reset(kind)
        begin = time.monotonic()
        process = self.start(self._arguments(plan), *(strace if plan["moment"] == "write" else ()))
        steps = 0
        try:
            while wait(process, 0.005) is None and time.monotonic() < begin + TIMEOUT_SECONDS:
                steps = sum(len(recorded_steps(folder)) for folder in self._run_folders())
                is_reached = {
                    "time": time.monotonic() > begin + fraction * seconds,
                    "step": steps > fraction * (RUNS * STEPS - 1), "write": False,
                }  # fmt: skip
                if is_reached[plan["moment"]]:
                    break
            finished = len([*self._work.glob("out/cells/*/seed_*/result.json")])
            elapsed, running = time.monotonic() - begin, len(processes(f"{self.folder}/"))
            code = wait(process, 0)
            if code is None and plan["moment"] != "write":
                process.send_signal(number)
                if plan["again_seconds"] and wait(process, plan["again_seconds"]) is None:
                    process.send_signal(number)
            code = wait(process, TIMEOUT_SECONDS)
            end = time.monotonic()
            while (left := processes(f"{self.folder}/")) and time.monotonic() < end + GONE_SECONDS:
                time.sleep(0.02)
            gone = time.monotonic() - end
            outlived = [" ".join(each.info["cmdline"]) for each in left]
        finally:
            for each in processes(f"{self.folder}/"):
                each.kill()
        phase, renames = f"{finished} of {RUNS} runs finished", list[str]()
        if plan["moment"] == "write":
            renames = [line for line in log.read_text().splitlines() if line.startswith("rename")]
        if len(renames) >= write:
            written = Path(renames[write - 1].split('"')[-2])
            # The names of outputs and encoded examples have digests.
            is_numbered = written.parent.name in ("outputs", "encoded")
            name = f"{written.parent.name}/*{written.suffix}" if is_numbered else written.name
            phase = f"write of {name}"
        elif kind != "search":
            quarter = min(int(4 * elapsed / seconds), 3)
            phase = f"{25 * quarter} to {25 * quarter + 25} % of the time"
        return {
            "phase": phase, "elapsed_seconds": round(elapsed, 2), "finished_runs": finished,
            "steps": steps, "processes": running, "code": code,
            "stop_seconds": round(end - begin - elapsed, 2), "gone_seconds": round(gone, 2),
            "outlived": outlived,
        }  # fmt: skip

    def _half_written(
        self, kind: str, found: dict[str, str], expected: dict[str, str]
    ) -> dict[str, str]:
        """Return the files under final names that are neither absent nor complete, and why."""
        problems = {}
        for name, digest in found.items():
            if TEMPORARY.search(name) or digest in ("", expected.get(name)):
                continue
            try:
                if kind != "search":
                    raise ValueError("not the file of the unbroken command")
                check_whole(self._work / name)
            except (ValueError, OSError, MegatronDebertaError) as error:
                problems[name] = f"{type(error).__name__}: {error}"
        return problems

    def _last_lines(self) -> dict[str, list[str]]:
        """Return the last lines of the output of the command and of a search's runs."""
        logs = [self.folder / PRINTED, self.folder / "errors"]
        logs += [folder / "search.log" for folder in self._run_folders()]
        return {
            str(path.relative_to(self.folder)): path.read_text(errors="replace").splitlines()[-8:]
            for path in logs
            if path.exists()
        }


@contextlib.contextmanager
def open_cases() -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield the function that runs a case."""
    with tempfile.TemporaryDirectory(prefix="search_kills.") as folder:
        yield SearchKills(Path(folder)).run


def main() -> int:
    """Run the missing cases; return 1 if one failed."""
    assert __doc__
    return campaign.run_numbered(__doc__, "search_kills", CASES, SEARCH_KILLS_CODE, open_cases)


if __name__ == "__main__":
    sys.exit(main())
