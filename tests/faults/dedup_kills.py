"""Kill deduplication in every stage, resume it, and compare the bytes of the result.

``python -m tests.faults.dedup_kills --output FILE.json`` runs the campaign: in every stage, the
first process, a worker or all processes are killed. Cases in the output file are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lib.provenance import provenance
from tests.support.duplicates import contents, make_corpus, run
from tests.support.jobs import ROOT

STAGES = (
    "sign", "exact", "mark", "candidates", "estimate", "needed", "collect", "verify", "resolve",
    "write", "check",
)  # fmt: skip
VICTIMS = ("first process", "worker", "all")
CASES = [(stage, victim) for stage in STAGES for victim in VICTIMS]
UNIT_BYTES = 20_000

_CHILD = """
import sys
from pathlib import Path
from tests.support.duplicates import run
if __name__ == "__main__":
    run(sys.argv[2:], Path(sys.argv[1]), workers=2, unit_bytes=%d,
        advance=lambda *at: (print(*at[:3], flush=True), sys.stdin.readline()))
"""


def kill_and_resume(number: int, folder: Path, reference: dict[str, bytes]) -> dict[str, object]:
    """Run one case; raises AssertionError if it fails."""
    stage, victim = CASES[number]
    rng = random.Random(number)
    inputs = sorted(str(path) for path in folder.glob("part-*.jsonl"))
    output = folder / f"out-{number}"
    script = folder / "child.py"
    script.write_text(_CHILD % UNIT_BYTES)
    child = subprocess.Popen(
        [sys.executable, str(script), str(output), *inputs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    min_done = rng.randrange(3)
    for line in child.stdout:
        name, tasks, done = line.split()
        if name == stage and (int(done) >= min_done or done == tasks):
            # Workers start after the first message of the first stage.
            if victim != "worker" or _workers(child.pid):
                break
        child.stdin.write("\n")
        child.stdin.flush()
    else:
        raise AssertionError(f"ended (exit {child.wait()}) before the kill")
    # The first process waits for input here, while the workers continue.
    time.sleep(rng.uniform(0, 0.08))
    workers = _workers(child.pid)
    if victim == "worker":
        os.kill(rng.choice(workers), signal.SIGKILL)
    elif victim == "first process":
        child.kill()
    else:
        os.killpg(child.pid, signal.SIGKILL)
    child.stdin.close()
    child.stdout.read()
    code = child.wait(timeout=60)
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers survive the first process"
        time.sleep(0.01)
    finished = output.exists()
    if finished:
        assert contents(output) == reference, "incomplete output under its final name"
    run(inputs, output, workers=rng.randrange(3), unit_bytes=UNIT_BYTES)
    assert contents(output) == reference, "the bytes differ"
    assert not list(folder.glob(f"{output.name}.*")), "temporary files are left"
    return {"stage": stage, "victim": victim, "exit_code": code, "finished": finished}


def make_reference(folder: Path) -> dict[str, bytes]:
    """Write the corpus, and return the output of an uninterrupted run."""
    inputs = make_corpus(folder)
    run(inputs, folder / "reference", unit_bytes=UNIT_BYTES)
    return contents(folder / "reference")


def _workers(parent: int) -> list[int]:
    """Return the worker processes, without the helper process of multiprocessing."""
    children = [
        int(pid)
        for task in Path(f"/proc/{parent}/task").glob("*/children")
        for pid in task.read_text().split()
    ]
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def main() -> None:
    """Run the cases that are not in the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    done: dict[str, dict[str, object]] = {}
    if args.output.exists():
        done = json.loads(args.output.read_text())["cases"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = make_reference(folder)
        for number in range(len(CASES)):
            if str(number) not in done:
                done[str(number)] = kill_and_resume(number, folder, reference)
                before = sum(not case["finished"] for case in done.values())
                result = {"identical": len(done), "killed_before_the_end": before, "cases": done}
                result |= provenance()
                args.output.write_text(json.dumps(result, indent=2) + "\n")
                print(number, done[str(number)], flush=True)


if __name__ == "__main__":
    main()
