"""Kill preprocessing at random times, resume it and compare every byte of the output.

Each case is determined by its number. Each case appends one JSON line to the output; cases that are
there are skipped, so the campaign can be interrupted. Lines about other code do not count.

  python -m tests.faults.preprocess_kills --cases 120
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, append_line, code_digest, read_lines
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.tables.faults import PREPROCESS_CODE
from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.machine_text import documents

OUTPUT = RESULTS / "preprocess_kills.jsonl"
PHASES = ("reading", "tokenizing", "committing", "merging", "publishing")
TARGETS = ("worker", "parent", "rank", "task")
TIMEOUT_SECONDS = 120
MAX_TRIES = 8


@dataclass(frozen=True, slots=True)
class Fixture:
    """Fixtures of all cases.

    Attributes:
        folder: working folder.
        arguments: of the command, without output and processes.
        expected: digest of every file of an uninterrupted run, by name.
        counts: entries and calls of each phase of that run.
    """

    folder: Path
    arguments: list[str]
    expected: dict[str, str]
    counts: dict[str, dict[str, int]]


def prepare(folder: Path) -> Fixture:
    """Make a corpus of a plain and a compressed file, a tokenizer, and the expected result."""
    texts = documents()
    tokenizer = str(folder / "tokenizer")
    train_sentencepiece(texts[:40], tokenizer, vocab_size=500)
    lines = [
        json.dumps({"text": text, "title": text[:40]}) if index % 40 else "{broken"
        for index, text in enumerate(texts * 2, 1)
    ]
    half = len(lines) // 2
    (folder / "a.jsonl").write_text("\n".join(lines[:half]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[half:]).encode()))
    arguments = [
        "--input", str(folder / "a.jsonl"), str(folder / "b.jsonl.gz"), "--tokenizer", tokenizer,
        "--keys", "text", "title", "--unit-mb", "0.05", "--max-bad-fraction", "0.1",
    ]  # fmt: skip
    counts = folder / "counts.json"
    output = folder / "whole"
    done = run(command(arguments, output, workers=0), {"count": str(counts)})
    assert done == 0, "the uninterrupted run fails"
    return Fixture(folder, arguments, digests(output), json.loads(counts.read_text()))


def command(arguments: list[str], output: Path, *, workers: int, ranks: int = 0) -> list[str]:
    """Return the command line, with mpirun for ranks."""
    launcher = Path(sys.executable).with_name("mpirun")
    mpirun = [str(launcher), "-n", str(ranks), "--allow-run-as-root", "--oversubscribe"]
    return [
        *(mpirun if ranks else []),
        sys.executable, "-m", "megatron_deberta", "preprocess", *arguments,
        "--output", str(output / "c"), "--workers", str(workers),
    ]  # fmt: skip


def start(line: list[str], kill: dict[str, Any] | None) -> subprocess.Popen[bytes]:
    """Start a command with the injection of a kill."""
    path = [str(ROOT)]
    env = dict(os.environ)
    if kill is not None:
        path.insert(0, str(Path(__file__).with_name("injection")))
        env["PREPROCESS_KILL"] = json.dumps(kill)
    env["PYTHONPATH"] = os.pathsep.join(path)
    null = subprocess.DEVNULL
    return subprocess.Popen(line, env=env, stdin=null, stdout=null, stderr=null)


def run(line: list[str], kill: dict[str, Any] | None = None) -> int | None:
    """Run a command to its end; return its exit code, or None if it hangs."""
    process = start(line, kill)
    try:
        return process.wait(TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def digests(output: Path) -> dict[str, str]:
    """Return the digest of every file under a folder, by name."""
    if not output.exists():
        return {}
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file()
    }


def plan_kill(fixture: Fixture, number: int) -> dict[str, Any]:
    """Choose the process and the time of the kill."""
    generator = random.Random(f"preprocess {number}")
    phase = PHASES[number % len(PHASES)]
    target = TARGETS[number // len(PHASES) % len(TARGETS)]
    if phase in ("reading", "tokenizing"):
        # Several processes share the entries.
        entry = generator.randint(1, max(1, fixture.counts["entries"][phase] // 3))
        return {
            "phase": phase, "target": target, "entry": entry, "call": 0,
            "delay": round(generator.uniform(0.0, 0.02), 4),
        }  # fmt: skip
    calls = fixture.counts["calls"][phase]
    call = generator.randint(1, calls // 3 if phase == "committing" else calls)
    return {"phase": phase, "target": target, "entry": 0, "call": call, "delay": 0}


def interrupt(
    fixture: Fixture, output: Path, plan: dict[str, Any], generator: random.Random
) -> tuple[int | None, dict[str, Any]]:
    """Run until the kill; a kill point that no process reached is moved to an earlier time."""
    token = fixture.folder / "token"
    target = plan["target"]
    for _ in range(MAX_TRIES):
        token.unlink(missing_ok=True)
        shutil.rmtree(output, ignore_errors=True)
        kill = {
            **plan,
            "target": "parent" if target == "parent" else "self",
            "token": str(token),
        }
        workers = generator.choice((1, 2)) if target in ("worker", "parent") else 0
        if target == "task":
            code = run_tasks(fixture, output, kill)
        else:
            ranks = 2 if target == "rank" else 0
            line = command(fixture.arguments, output, workers=workers, ranks=ranks)
            code = run(line, kill)
        if token.exists():
            return code, plan
        for name in ("entry", "call"):
            plan = {**plan, name: (plan[name] + 1) // 2}
    raise RuntimeError(f"no process reached {plan}")


def run_tasks(fixture: Fixture, output: Path, kill: dict[str, Any]) -> int | None:
    """Run two array tasks, of which one is killed; the other has to finish alone."""
    line = command(fixture.arguments, output, workers=0)
    tasks = [
        start([*line, "--array-task", f"{index}/2"], kill if index == 0 else None)
        for index in range(2)
    ]
    try:
        return [task.wait(TIMEOUT_SECONDS) for task in tasks][1]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for task in tasks:
            task.kill()
            task.wait()


def run_case(fixture: Fixture, number: int) -> dict[str, Any]:
    """Run one case and return its result."""
    generator = random.Random(f"processes {number}")
    output = fixture.folder / f"case-{number}"
    plan = plan_kill(fixture, number)
    begin = time.monotonic()
    code, plan = interrupt(fixture, output, plan, generator)
    wait_for_orphans(output)
    files = digests(output)
    published = {name for name in files if "/" not in name}
    records = {Path(name).stem for name in files if "/done/" in name and name.endswith(".json")}
    # Files may have their final names only once all files are complete.
    is_early = any(fixture.expected.get(name) != files[name] for name in published)
    is_early |= bool(published) and bool(records) and "manifests" not in records
    again = {"workers": generator.choice((0, 1, 2)), "ranks": generator.choice((0, 0, 2))}
    resumed = run(command(fixture.arguments, output, **again))
    result = digests(output)
    case = {
        "case": number,
        **plan,
        "exit_code": code,
        "hung": code is None or resumed is None,
        "units_done": sum(name[:8].isdigit() for name in records),
        "steps_done": sorted(name for name in records if not name[:8].isdigit()),
        "published": len(published),
        "resumed_with": again,
        "resumed_exit_code": resumed,
        "early_name": is_early,
        "left_over": sorted(set(result) - set(fixture.expected)),
        "identical": result == fixture.expected,
        "seconds": round(time.monotonic() - begin, 2),
    }
    case["passed"] = (
        case["identical"] and not is_early and resumed == 0 and not case["hung"]
        and (code == 0) == (plan["target"] == "task")
    )  # fmt: skip
    shutil.rmtree(output, ignore_errors=True)
    return case


def wait_for_orphans(output: Path) -> None:
    """Wait until no process uses the folder: workers end soon after their parent."""
    for _ in range(100):
        if not any(str(output).encode() in cmdline for cmdline in command_lines()):
            return
        time.sleep(0.05)


def command_lines() -> list[bytes]:
    """Return the command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue
    return lines


def main() -> int:
    """Run the missing cases; return 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--part", default="0/1", help="K/N: every Nth case from K on")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    code = code_digest(PREPROCESS_CODE)
    cases = [line for line in read_lines(args.output) if line["code_digest"] == code]
    done = {case["case"] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        fixture = prepare(Path(folder))
        for number in range(part, args.cases, parts):
            if number in done:
                continue
            case = run_case(fixture, number) | {"code_digest": code} | provenance()
            cases.append(case)
            append_line(args.output, case)
            print(f"case {number}: {'passed' if case['passed'] else 'FAILED'}", flush=True)
    failed = [case["case"] for case in cases if not case["passed"]]
    print(f"{len(cases) - len(failed)} of {len(cases)} passed; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
