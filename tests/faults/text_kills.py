"""Kill jobs over text on every engine, resume them and compare every byte of the output.

A process stops at a chosen point of ``preprocess`` or ``deduplicate``, a victim is killed
(a worker, an MPI rank, the driver, a Dask node or scheduler, tasks of a job array), and the run
must end by itself; with Dask it goes on without a worker or a node. The command is then started
again on any engine. Each case is determined by its number and appends one JSON line to the output;
cases that are there for the same code are skipped, so the campaign can be interrupted.

  python -m tests.faults.text_kills --cases 100
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.campaigns import RESULTS, append_line, code_digest, read_lines
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.tables.faults import TEXT_KILLS_CODE
from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.duplicates import make_corpus
from tests.support.machine_text import documents

OUTPUT = RESULTS / "text_kills.jsonl"
POINTS = {
    "preprocess": ("read", "encode", "part", "record", "copy", "hash", "rename"),
    "deduplicate": (
        "sign", "exact", "mark", "candidates", "estimate", "needed", "collect", "verify", "resolve",
        "write", "check", "publish",
    ),
}  # fmt: skip
PHASES = [(command, point) for command, points in POINTS.items() for point in points]
VICTIMS = [
    ("local", "worker"), ("mpi", "worker"), ("dask", "worker"), ("array", "task"),
    ("local", "driver"), ("mpi", "driver"), ("dask", "driver"), ("array", "all"),
    ("dask", "node"), ("dask", "scheduler"),
]  # fmt: skip
# What the command, mpirun or Dask say of a death that ends the run.
REPORTS = {
    ("local", "worker"): "a worker process died",
    ("mpi", "worker"): "signal 9 (Killed)",
    ("mpi", "driver"): "signal 9 (Killed)",
    ("dask", "scheduler"): "the scheduler died",
}
# Points that only the first process reaches, once.
SINGLE = ("rename", "publish", "mark", "needed", "resolve", "hash")
TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Fixture:
    """Inputs of all cases.

    Attributes:
        folder: working folder.
        arguments: of each command, without output and engine.
        expected: digest of every file of an uninterrupted run of each command, by name.
    """

    folder: Path
    arguments: dict[str, list[str]]
    expected: dict[str, dict[str, str]]


@dataclass(slots=True)
class Running:
    """A started command.

    Attributes:
        processes: of the command; several for a job array.
        nodes: programs of the Dask workers.
        scheduler: of Dask.
        log: standard error of the command.
    """

    processes: list[subprocess.Popen[bytes]]
    log: Path
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    scheduler: subprocess.Popen[bytes] | None = None


def prepare(folder: Path) -> Fixture:
    """Write the corpora and a tokenizer, and run both commands without interruption."""
    texts = [text[:4000] for text in documents()[:40]]
    tokenizer = str(folder / "tokenizer")
    train_sentencepiece(texts, tokenizer, vocab_size=400)
    lines = [
        json.dumps({"text": text, "title": text[:40]}) if index % 15 else "{broken"
        for index, text in enumerate(texts, 1)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines[:20]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[20:]).encode()))
    arguments = {
        "preprocess": [
            "--input", str(folder / "a.jsonl"), str(folder / "b.jsonl.gz"), "--tokenizer",
            tokenizer, "--keys", "text", "title", "--unit-mb", "0.01", "--max-bad-fraction", "0.2",
        ],
        "deduplicate": ["--input", *make_corpus(folder)],
    }  # fmt: skip
    fixture = Fixture(folder, arguments, {})
    for command in POINTS:
        with started(fixture, command, folder / command, "local", workers=0) as run:
            assert wait(run) == [0], run.log.read_text()
        fixture.expected[command] = digests(folder / command)
    return fixture


@contextlib.contextmanager
def started(
    fixture: Fixture, command: str, output: Path, engine: str, *, workers: int = 2
) -> Iterator[Running]:
    """Start a command on an engine; all its processes are killed at the end."""
    log = fixture.folder / "log"
    line = [sys.executable, "-m", "megatron_deberta", command, *fixture.arguments[command]]
    line += ["--output", str(output / "c")]
    stack = contextlib.ExitStack()
    run = Running([], log)
    with stack, log.open("wb") as stream:
        if engine == "dask":
            file = fixture.folder / "scheduler.json"
            file.unlink(missing_ok=True)
            _start_dask(stack, run, fixture, file)
            line += ["--dask", str(file)]
        elif engine == "local":
            line += ["--workers", str(workers)]
        elif engine == "mpi":
            mpirun = str(Path(sys.executable).with_name("mpirun"))
            line = [mpirun, "-n", "3", "--allow-run-as-root", "--oversubscribe", *line]
        tasks = [["--workers", "0", "--array-task", f"{k}/3"] for k in range(3)]
        for extra in tasks if engine == "array" else [[]]:
            run.processes.append(_start(stack, [*line, *extra], fixture.folder, stream))
        yield run


def _start_dask(stack: contextlib.ExitStack, run: Running, fixture: Fixture, file: Path) -> None:
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1"]
    dask += ["--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    run.scheduler = _start(stack, dask, fixture.folder, None)
    worker = [
        sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file),
        "--nworkers", "2", "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1",
        "--local-directory",
    ]  # fmt: skip
    for node in range(2):
        own = [*worker, str(fixture.folder / f"node{node}")]
        run.nodes.append(_start(stack, own, fixture.folder, None))
    end = time.monotonic() + TIMEOUT_SECONDS
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)


def _start(
    stack: contextlib.ExitStack, line: list[str], folder: Path, log: Any
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join((str(Path(__file__).with_name("injection")), str(ROOT)))
    env = os.environ | {"PYTHONPATH": path, "TEXT_KILLS": str(folder)}
    # A program in a session of its own gets no signal of another one's group.
    process = subprocess.Popen(
        line, env=env, stdin=subprocess.DEVNULL, stdout=log or subprocess.DEVNULL,
        stderr=log or subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(kill_tree, process.pid)
    return process


def kill_tree(pid: int) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def wait(run: Running) -> list[int | None]:
    """Return the exit codes; None: a process did not end."""
    end = time.monotonic() + TIMEOUT_SECONDS
    codes: list[int | None] = []
    for process in run.processes:
        try:
            codes.append(process.wait(max(end - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return codes


def victims(run: Running, engine: str, victim: str, stopped: int) -> list[int]:
    """Return the processes to kill.

    Args:
        run: the command.
        engine: where it runs.
        victim: kind of process.
        stopped: process that waits at the point; preferred if it is of this kind.
    """
    if victim == "scheduler":
        assert run.scheduler is not None
        return [run.scheduler.pid]
    if victim == "node":
        groups = [[node.pid, *_children(node.pid)] for node in run.nodes]
        return next((group for group in groups if stopped in group), groups[0])
    if victim == "all":
        return [process.pid for process in run.processes]
    found: list[int] = []
    if victim == "task":
        found = [process.pid for process in run.processes]
    elif engine == "mpi":
        ranks = {pid: _rank(pid) for pid in _children(run.processes[0].pid)}
        wanted = ("0",) if victim == "driver" else ("1", "2")
        found = [pid for pid, rank in ranks.items() if rank in wanted]
    elif victim == "driver":
        found = [run.processes[0].pid]
    else:
        parents = run.nodes if engine == "dask" else run.processes
        found = [pid for parent in parents for pid in _children(parent.pid)]
    return [stopped] if stopped in found else found[:1]


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in word for word in child.cmdline()):
                    found.append(child.pid)
    return found


def _rank(pid: int) -> str:
    try:
        return psutil.Process(pid).environ().get("OMPI_COMM_WORLD_RANK", "")
    except psutil.NoSuchProcess:
        return ""


def kill_in_phase(fixture: Fixture, run: Running, plan: dict[str, Any]) -> bool:
    """Wait until a process is at the point, and kill the victim; return whether it was reached."""
    token = fixture.folder / "token"
    end = time.monotonic() + TIMEOUT_SECONDS
    while not (token.exists() and token.read_text()):
        if all(process.poll() is not None for process in run.processes):
            return False
        assert time.monotonic() < end, "the run hangs before the kill"
        time.sleep(0.005)
    found = victims(run, plan["engine"], plan["victim"], int(token.read_text()))
    assert found, f"no {plan['victim']} to kill"
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (fixture.folder / "go").touch()
    return True


def plan_case(number: int) -> dict[str, Any]:
    """Choose command, point, engine and victim of a case."""
    generator = random.Random(f"text kills {number}")
    command, point = PHASES[number % len(PHASES)]
    turn = number // len(PHASES)
    engine, victim = VICTIMS[(number + 4 * turn) % len(VICTIMS)]
    if (engine, victim, point) == ("local", "worker", "publish"):
        engine, victim = "mpi", "driver"  # The local workers have ended by then.
    entry = 1 if point in SINGLE else generator.randint(1, 3)
    again = generator.choice(("local", "mpi", "dask", "array"))
    workers = generator.randrange(4)
    return {
        "command": command, "point": point, "engine": engine, "victim": victim, "entry": entry,
        "resumed_on": again, "resumed_workers": workers,
    }  # fmt: skip


def run_case(fixture: Fixture, number: int) -> dict[str, Any]:
    """Run one case and return its result."""
    plan = plan_case(number)
    output = fixture.folder / f"case-{number}"
    begin = time.monotonic()
    command, engine = plan["command"], plan["engine"]
    expected = fixture.expected[command]
    while True:
        for name in ("token", "go"):
            (fixture.folder / name).unlink(missing_ok=True)
        shutil.rmtree(output, ignore_errors=True)
        (fixture.folder / "plan.json").write_text(json.dumps(plan))
        with started(fixture, command, output, engine) as run:
            was_reached = kill_in_phase(fixture, run, plan)
            codes = wait(run)
            message = run.log.read_text(errors="replace")
            (fixture.folder / "plan.json").unlink()
            published = {n: d for n, d in digests(output).items() if "unfinished" not in n}
            if was_reached:
                # Dask's workers may still work on units of a killed driver.
                resumed = resume(fixture, plan, output)
        if was_reached:
            break
        assert plan["entry"] > 1, f"no process reached {plan}: {message}"
        plan["entry"] = 1
    files = digests(output)
    report = REPORTS.get((engine, plan["victim"]), "")
    goes_on = (engine, plan["victim"]) in (("dask", "worker"), ("dask", "node"))
    case = {
        "case": number,
        **plan,
        "exit_codes": codes,
        "goes_on": codes == [0],
        "early_name": any(expected.get(name) != digest for name, digest in published.items()),
        "reported": report in message or codes == [0],
        "traceback": "Traceback" in message,
        "resumed_exit_codes": resumed,
        "left_over": sorted(set(files) - set(expected)),
        "identical": files == expected,
        "seconds": round(time.monotonic() - begin, 2),
    }
    case["ok"] = (
        case["identical"] and not case["early_name"] and None not in codes and case["reported"]
        and resumed[0] is not None and 0 in resumed and (codes == [0] or not goes_on)
        and not (case["traceback"] and engine == "local")
    )  # fmt: skip
    if not case["ok"]:
        case["message"] = message[-2000:]
    shutil.rmtree(output, ignore_errors=True)
    return case


def resume(fixture: Fixture, plan: dict[str, Any], output: Path) -> list[int | None]:
    """Start the command again until it is done; return the exit codes."""
    keep = fixture.folder / "log"
    first = keep.read_bytes()
    codes: list[int | None] = []
    engine = plan["resumed_on"]
    # The killed driver's workers end soon after it, and the lock with the last of them.
    for _ in range(3):
        workers = plan["resumed_workers"]
        with started(fixture, plan["command"], output, engine, workers=workers) as run:
            codes = wait(run)
        if not (output / "c.unfinished").exists():
            break
        engine = "local"
    keep.write_bytes(first)
    return codes


def digests(output: Path) -> dict[str, str]:
    """Return the digest of every file under a folder, by name."""
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file()
    }


def main() -> int:
    """Run the missing cases; return 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    code = code_digest(TEXT_KILLS_CODE)
    cases = [line for line in read_lines(args.output) if line["code_digest"] == code]
    done = {case["case"] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        fixture = prepare(Path(folder))
        for number in range(args.cases):
            if number in done:
                continue
            case = run_case(fixture, number) | {"code_digest": code} | provenance()
            cases.append(case)
            append_line(args.output, case)
            print(f"case {number}: {'passed' if case['ok'] else 'FAILED'}", flush=True)
    failed = [case["case"] for case in cases if not case["ok"]]
    print(f"{len(cases) - len(failed)} of {len(cases)} passed; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
