"""Faults in fine-tuning that keeps its best checkpoint: the same one must be selected in the end.

A tiny task is fine-tuned with validations and saves every few steps. A process of the run is killed
or preempted in a validation, in the save of a new best checkpoint or between the two, or the disk
is full at a write of saves, with ``checkpoint.on_failure`` ``stop`` or ``continue``. The run is
started again until it is finished. Then all losses and scores are bit-identical to those of the
uninterrupted run, and the best checkpoint is the first one with the highest score, of those that
could be saved: it is intact, has the uninterrupted run's tensors, and ``evaluate`` computes its
score. After each fault the run's results would be those of the best checkpoint that is there.

Each case is determined by its number and appends one JSON line to the output. Lines about other
code do not count.

  python -m tests.faults.finetune_faults            all missing cases
  python -m tests.faults.finetune_faults --only 17  repeat one case
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables.faults import FINETUNE_FAULTS_CODE
from megatron_deberta.checkpoint.layout import (
    committed_steps,
    find_best,
    leftovers,
    read_best,
    step_dir,
)
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE, MegatronDebertaError
from megatron_deberta.evaluate.outputs import find_runs, finished_validation
from tests.faults.campaign import run_numbered
from tests.faults.finetune_points import FULL, KILLED, OF_ALL_RANKS, POINTS, Injection, Point
from tests.support import jobs
from tests.support.tiny_task import MODEL, write_task

CASES = 40
STEPS, EVAL_EVERY, SAVE_EVERY = 18, 2, 3
RUN = (
    f"train.steps={STEPS}", f"train.eval_every={EVAL_EVERY}", "train.global_batch_size=8",
    "train.micro_batch_size=4", "train.device=cpu", "parallel.engine=plain",
    "optimizer.learning_rate=1e-3", "optimizer.warmup_steps=0", "log.every=1",
    "log.tensorboard=false", "log.level=warning", "cluster.collective_timeout_minutes=0.3",
)  # fmt: skip
SEEDS = range(2, 40)
# What the processes would import, each again.
PRELOADED = (
    "matplotlib.pyplot", "megatron_deberta.cli.evaluate", "megatron_deberta.cli.finetune",
    "megatron_deberta.cli.pretrain", "megatron_deberta.evaluate.predict",
    "megatron_deberta.finetune.data", "megatron_deberta.finetune.settings",
    "megatron_deberta.planning.plan", "megatron_deberta.train.run", "torch._dynamo",
)  # fmt: skip
KINDS = ("kill", "kill", "preempt", "full disk", "full disk, continue")
"""Kind of the cases by number, repeatedly."""


def plan_case(number: int) -> dict[str, Any]:
    """Return the kind, the number of ranks and the faults of a case.

    ``at`` chooses a fault's step, of those at which it can come; the disk is full for ``lasting``
    more steps, and three steps later the run ``is_killed``.
    """
    rng = random.Random(f"finetune faults {number}")
    turn, place = divmod(number, len(KINDS))
    kind, lasting, at = KINDS[place], 0, rng.randrange(1000)
    if kind == "kill":
        points = [KILLED[(2 * turn + place) % len(KILLED)]]
        # Half of the killed runs are killed again.
        points += [rng.choice(KILLED)] if rng.random() < 0.5 else []
    elif kind == "preempt":
        points = [KILLED[(2 * turn + 1) % len(KILLED)]]
    elif kind == "full disk":
        points = [FULL[(turn + 1) % len(FULL)]]
    else:
        points = [FULL[(turn + 2) % len(FULL)]]
        # For one save, to the end, or for a few steps; mostly from the best step on.
        lasting = (0, STEPS, SAVE_EVERY)[turn % 3]
        at = -1 if turn % 4 else at
    is_killed = "continue" in kind and lasting < STEPS and turn % 2 == 0
    fault = {"at": at, "rank": number % 2, "lasting": lasting, "is_killed": is_killed}
    return {
        "kind": kind, "ranks": 1 + (turn % 4 == 1), "asynchronous": rng.random() < 0.5,
        "faults": [{"point": point, **fault} for point in points],
    }  # fmt: skip


def _run_process(
    fault: Mapping[str, Any] | None, environment: dict[str, str], command: list[str], log: Path
) -> None:
    # Not those of a test whose output is captured.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if fault is not None:
        Injection(fault)
    jobs.run_rank(environment, command, str(log))


Scores = Mapping[int, tuple[float, float]]
"""Loss and score of the validations, by step."""


def read_losses(run_dir: Path) -> dict[int, float]:
    """Return the recorded training loss of each step."""
    return {step: record["loss"] for step, record in jobs.records(run_dir).items()}


def read_scores(run_dir: Path) -> Scores:
    """Return the recorded validations."""
    records = jobs.records(run_dir, "validation")
    return {step: (record["loss"], record["score"]) for step, record in records.items()}


def improved_steps(scores: Scores, unsaved: Collection[int] = ()) -> list[int]:
    """Return the steps with a better score than all before, except for those without a save."""
    best, steps = -math.inf, []
    for step, (_, score) in sorted(scores.items()):
        if score > best and step not in unsaved:
            best = score
            steps.append(step)
    return steps


@dataclass(frozen=True, slots=True)
class Reference:
    """The uninterrupted run: its seed, losses, validations, and digests of every step's tensors."""

    seed: int
    losses: dict[int, float]
    scores: Scores
    states: dict[int, str]

    def steps_of(self, point: Point, kind: str) -> list[int]:
        """Return the steps at which a fault can come at a point."""
        improved = improved_steps(self.scores)
        # After a signal the next start validates, and selects the checkpoint that it resumes from.
        validated = improved[-1:] if kind == "preempt" else list(self.scores)
        steps = {
            "all": list(range(1, STEPS + 1)), "validated": validated, "improved": improved,
            "replaced": improved[1:],
        }[point.steps]  # fmt: skip
        # A run that is told to stop in its last step finishes.
        return [step for step in steps if kind != "preempt" or step < STEPS - 1]


class FinetuneFaults:
    """Cases on one tiny task; reference runs are made when they are needed.

    Args:
        folder: working folder.
    """

    def __init__(self, folder: Path) -> None:
        for name in PRELOADED:
            importlib.import_module(name)
        self._folder, self._task = folder, write_task(folder / "data")
        self._references: dict[int, Reference] = {}

    def reference(self, ranks: int) -> Reference:
        """Return the first run with three better scores, the last of them early, and equal ones."""
        seeds = iter(SEEDS)
        while ranks not in self._references:
            seed = next(seeds)
            run_dir = self._folder / f"reference{ranks}-{seed}"
            options = ("checkpoint.save_every=1", "checkpoint.keep_last=null", f"train.seed={seed}")
            codes = self._finetune(run_dir, ranks, *options)
            assert codes == [EXIT_DONE] * ranks, self._output()
            scores = read_scores(run_dir)
            *others, best = improved_steps(scores)
            equal = [score for _, score in scores.values() if score == scores[best][1]]
            if len(others) >= 2 and best <= STEPS - 4 and len(equal) >= 2:
                assert find_best(run_dir) == step_dir(run_dir, best)
                states = {step: state_digest(run_dir, step) for step in committed_steps(run_dir)}
                reference = Reference(seed, read_losses(run_dir), scores, states)
                self._references[ranks] = reference
        return self._references[ranks]

    def run_case(self, case: int) -> dict[str, Any]:
        """Run one case and return its result."""
        began, plan, run_dir = time.monotonic(), plan_case(case), self._folder / "run"
        kind, ranks = plan["kind"], plan["ranks"]
        reference = self.reference(ranks)
        shutil.rmtree(run_dir, ignore_errors=True)
        options = (
            f"checkpoint.save_every={SAVE_EVERY}", "checkpoint.keep_last=1",
            f"checkpoint.asynchronous={str(plan['asynchronous']).lower()}",
            f"checkpoint.on_failure={'continue' if 'continue' in kind else 'stop'}",
            f"train.seed={reference.seed}",
        )  # fmt: skip
        faults, all_codes = [], []
        problems: list[str] = []
        unsaved: list[int] = []
        for planned in plan["faults"]:
            point, done = POINTS[planned["point"]], max(committed_steps(run_dir), default=0)
            steps = [step for step in reference.steps_of(point, kind) if step > done]
            if not steps:
                continue
            step = steps[planned["at"] % len(steps)]
            last = step + planned["lasting"]
            fault = {
                "point": planned["point"], "step": step, "last": last,
                "rank": planned["rank"] if ranks > 1 and planned["point"] in OF_ALL_RANKS else 0,
                "killed_at": last + 3 if planned["is_killed"] else None,
            }  # fmt: skip
            hits = self._folder / "hits"
            hits.unlink(missing_ok=True)
            injected = {**fault, "kind": kind, "hits": str(hits)}
            codes = self._finetune(run_dir, ranks, *options, fault=injected)
            fault["hits"] = [int(line) for line in read_text(hits).split()]
            faults.append(fault)
            all_codes.append(codes)
            if not fault["hits"] or not are_expected(codes, kind, fault):
                problems.append(f"{fault}: exit codes {codes}: {self._output()}")
            problems += selection_problems(run_dir)
            if "continue" in kind and planned["point"] != "best.json":
                # Steps after the newest checkpoint are repeated.
                kept = max(committed_steps(run_dir), default=0) if any(codes) else STEPS
                unsaved = [hit for hit in fault["hits"] if hit <= kept]
        if any(all_codes[-1]):
            all_codes.append(self._finetune(run_dir, ranks, *options))
        if any(all_codes[-1]):
            problems.append(f"exit codes {all_codes[-1]}: {self._output()}")
        else:
            best = improved_steps(reference.scores, unsaved)[-1]
            problems += self._problems_of_end(run_dir, reference, best)
        return {
            **plan, "faults": faults, "codes": all_codes, "not_saved": unsaved,
            "best": read_best(run_dir), "problems": problems, "ok": not problems,
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip

    def _problems_of_end(self, run_dir: Path, reference: Reference, best: int) -> list[str]:
        """Return what is wrong in a finished run whose best step is known."""
        problems = selection_problems(run_dir)
        report, recorded = self._folder / "report.json", read_best(run_dir)
        command = ["evaluate", "task", str(self._task / "task.yaml"), "--model", str(run_dir)]
        command += ["--data", str(self._task), "--output", str(report)]
        report.unlink(missing_ok=True)
        self._start(command, 1)
        evaluated = json.loads(read_text(report) or '{"loss": NaN, "accuracy": NaN}')
        states = {step: state_digest(run_dir, step) for step in committed_steps(run_dir)}
        result, scores = finished_validation(run_dir, "accuracy"), read_scores(run_dir)
        loss, score = reference.scores[best]
        found = {
            "losses": read_losses(run_dir) == reference.losses,
            "scores": scores == reference.scores,
            "best.json": recorded and (recorded["step"], recorded["score"]) == (best, score),
            "search": result and (result.step, result.score) == (best, score),
            "checkpoints": {best, STEPS} <= set(states) and not leftovers(run_dir),
            "tensors": states.items() <= reference.states.items(),
            "evaluate": evaluated["accuracy"] == score
            and math.isclose(evaluated["loss"], loss, rel_tol=1e-5),
        }
        if wrong := [name for name, is_right in found.items() if not is_right]:
            text = f"not step {best} with {score}: {recorded}, {result}, {scores}, {sorted(states)}"
            problems.append(f"{', '.join(wrong)}: {text}, {evaluated}; {self._output()}")
        return problems

    def _finetune(
        self, run_dir: Path, ranks: int, *options: str, fault: Mapping[str, Any] | None = None
    ) -> list[int | None]:
        command = ["finetune", str(self._task / "task.yaml"), "--model", str(MODEL)]
        command += ["--data", str(self._task), f"train.run_dir={run_dir}", *RUN, *options]
        return self._start(command, ranks, fault)

    def _start(
        self, command: list[str], ranks: int, fault: Mapping[str, Any] | None = None
    ) -> list[int | None]:
        """Run a command to its end; return the exit codes. None: a process did not end."""
        port, processes = jobs.free_port(), []
        for log in self._folder.glob("*.log"):
            log.unlink()
        for rank in range(ranks):
            variables = jobs.rank_variables(rank, ranks, port) if ranks > 1 else {}
            own = fault if fault is not None and fault["rank"] == rank else None
            arguments = jobs.bare_environment(**variables), command, self._folder / f"{rank}.log"
            process = multiprocessing.get_context("fork").Process(
                target=_run_process, args=(own, *arguments)
            )
            process.start()
            processes.append(process)
        end = time.monotonic() + jobs.TIMEOUT
        for process in processes:
            process.join(max(end - time.monotonic(), 0.1))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return codes

    def _output(self) -> str:
        """Return the last lines of each process."""
        return " ".join(read_text(path)[-2000:] for path in sorted(self._folder.glob("*.log")))


def are_expected(codes: Collection[int | None], kind: str, fault: Mapping[str, Any]) -> bool:
    """Return whether these are the exit codes of the ranks after a fault."""
    if kind == "kill" or fault["killed_at"]:
        # The other ranks fail.
        return -signal.SIGKILL in codes and not {EXIT_DONE, None} & set(codes)
    # With continue, only the last save must succeed.
    code = EXIT_DONE if "continue" in kind and fault["last"] < STEPS else EXIT_FAILURE
    return set(codes) == {EXIT_REQUEUE if kind == "preempt" else code}


def selection_problems(run_dir: Path) -> list[str]:
    """Return what is wrong with the checkpoint that a run's results would be of now."""
    committed = committed_steps(run_dir)
    if not committed:
        return ["best.json names no checkpoint"] if read_best(run_dir) is not None else []
    scores = read_scores(run_dir)
    # The newest if none has a score.
    known = {step: scores[step] for step in committed if step in scores}
    best = improved_steps(known)[-1] if known else committed[-1]
    try:
        (run,) = find_runs(run_dir)
        CheckpointReader(run.checkpoint).verify()
    except MegatronDebertaError as error:
        return [f"{committed}: {error}"]
    if run.checkpoint == step_dir(run_dir, best):
        return []
    return [f"of {committed} with {scores}: {run.checkpoint.name}"]


def state_digest(run_dir: Path, step: int) -> str:
    """Return the digest of all tensors of a checkpoint; empty: it is damaged."""
    reader, digest = CheckpointReader(step_dir(run_dir, step)), hashlib.sha256()
    try:
        reader.verify()
    except MegatronDebertaError:
        return ""
    for name in reader.shapes:
        for kind in reader.kinds:
            digest.update(reader.tensor(name, kind).numpy().tobytes())
    return digest.hexdigest()


def read_text(path: Path) -> str:
    """Return the text of a file; empty: it does not exist."""
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def open_cases() -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield the function that runs a case."""
    # Not a TemporaryDirectory: forked processes would remove it.
    folder = Path(tempfile.mkdtemp(prefix="finetune_faults."))
    try:
        yield FinetuneFaults(folder).run_case
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the missing cases; return 1 if one failed."""
    assert __doc__
    return run_numbered(__doc__, "finetune_faults", CASES, FINETUNE_FAULTS_CODE, open_cases)


if __name__ == "__main__":
    sys.exit(main())
