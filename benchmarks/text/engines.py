"""Time of ``preprocess`` and ``deduplicate`` on each engine, and whether the bytes are the same.

Each engine has four workers, also on fewer cores: that shows what the engine costs and that its
result is right, not that it is faster. Times of a command include its start-up; the Dask cluster
(two nodes of two workers) is started before. Cases measured with the same code are skipped.

    python -m benchmarks.text.deduplicate make --folder /tmp/dedup300 --gigabytes 0.3
    python -m benchmarks.text.engines --folder /tmp/dedup300 --output FILE.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance, source_digest
from megatron_deberta.tokenizer.training import train_sentencepiece

ENGINES = ("local", "mpi", "dask", "array")
COMMANDS = ("preprocess", "deduplicate")
WORKERS = 4
VOCABULARY = 32_000
TRAINING_DOCUMENTS = 5_000
START_SECONDS = 60.0
_OUR_COMMAND = (sys.executable, "-m", "megatron_deberta")


def train_tokenizer(files: list[Path], folder: Path) -> None:
    """Train a unigram vocabulary on the first documents."""
    texts: list[str] = []
    for path in files:
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                texts.append(json.loads(line)["text"])
                if len(texts) == TRAINING_DOCUMENTS:
                    train_sentencepiece(texts, str(folder), vocab_size=VOCABULARY)
                    return
    train_sentencepiece(texts, str(folder), vocab_size=VOCABULARY)


@contextlib.contextmanager
def dask_cluster(folder: Path) -> Iterator[Path]:
    """Start a scheduler and two nodes of two workers; yield the scheduler's file."""
    file = folder / "scheduler.json"
    options = ["--no-dashboard", "--host", "127.0.0.1"]
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--nworkers", "2"]
    worker += ["--nthreads", "1", "--local-directory", str(folder)]
    with contextlib.ExitStack() as stack:
        for line in (scheduler, worker, worker):
            process = subprocess.Popen(
                [*line, *options, "--scheduler-file", str(file)], stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        end = time.monotonic() + START_SECONDS
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.1)
        # All workers have come before the command is timed.
        from distributed import Client

        with Client(scheduler_file=str(file)) as client:
            client.wait_for_workers(WORKERS, timeout=START_SECONDS)
        yield file


def run_case(engine: str, line: list[str], output: Path, work: Path) -> dict[str, Any]:
    """Run a command on an engine; return its times and the digest of its result."""
    output.mkdir(parents=True)
    line = [*line, "--output", str(output / "c")]
    with contextlib.ExitStack() as stack:
        if engine == "local":
            lines = [[*_OUR_COMMAND, *line, "--workers", str(WORKERS)]]
        elif engine == "mpi":
            mpirun = str(Path(sys.executable).with_name("mpirun"))
            ranks = [mpirun, "-n", str(WORKERS + 1), "--oversubscribe", "--allow-run-as-root"]
            lines = [[*ranks, *_OUR_COMMAND, *line]]
        elif engine == "dask":
            file = stack.enter_context(dask_cluster(work))
            lines = [[*_OUR_COMMAND, *line, "--dask", str(file)]]
        else:
            task = [*_OUR_COMMAND, *line, "--workers", "0", "--array-task"]
            lines = [[*task, f"{number}/{WORKERS}"] for number in range(WORKERS)]
        begin = time.perf_counter()
        processes = [subprocess.Popen(each, cwd=ROOT) for each in lines]
        codes = [process.wait() for process in processes]
        seconds = time.perf_counter() - begin
    if any(codes):
        raise RuntimeError(f"{engine}: {line[0]} ended with {codes}")
    digest = hashlib.sha256()
    for path in sorted(path for path in output.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(output)}\0".encode())
        digest.update(path.read_bytes())
    shutil.rmtree(output)
    return {"seconds": round(seconds, 2), "sha256": digest.hexdigest()}


def children_seconds() -> float:
    """Return the processor seconds of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Run the missing cases; return 0 if all engines gave the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    files = sorted(args.folder.glob("part-*.jsonl"))
    size = sum(path.stat().st_size for path in files)
    record = read_json(args.output, {})
    source = source_digest()
    if record.get("source") != source or record.get("input_bytes") != size:
        record = {"source": source, "input_bytes": size, "workers": WORKERS, "cases": {}}
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        work = Path(name)
        if any(f"preprocess {engine}" not in record["cases"] for engine in ENGINES):
            train_tokenizer(files, work / "tokenizer")
        for command in COMMANDS:
            line = [command, "--input", *map(str, files)]
            line += ["--tokenizer", str(work / "tokenizer")] if command == "preprocess" else []
            for engine in ENGINES:
                case = f"{command} {engine}"
                if case not in record["cases"]:
                    before = children_seconds()
                    found = run_case(engine, line, work / "out", work)
                    found["processor_seconds"] = round(children_seconds() - before, 2)
                    record["cases"][case] = found
                    write_json(args.output, {**provenance(), **record})
                    print(case, found, flush=True)
    digests = {c: {record["cases"][f"{c} {e}"]["sha256"] for e in ENGINES} for c in COMMANDS}
    same = all(len(each) == 1 for each in digests.values())
    print("all engines gave the same bytes" if same else f"the bytes differ: {digests}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
