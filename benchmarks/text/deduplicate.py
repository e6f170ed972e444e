"""Time, disk, memory and quality of ``megatron-deberta deduplicate``.

    python -m benchmarks.text.deduplicate make --folder /tmp/dedup --gigabytes 2
    python -m benchmarks.text.deduplicate run --folder /tmp/dedup --output FILE.json
    python -m benchmarks.text.deduplicate long --output FILE.json
    python -m benchmarks.text.deduplicate quality --output FILE.json
    python -m benchmarks.text.deduplicate sketches --output FILE.json    # needs datasketch too

``make`` writes documents of shuffled words of novels, so that no two are similar by chance. With
10 % probability each, a document is an exact copy of an earlier one in upper case, or a copy with
3 % of its words replaced. Every document is a function of its file and number, so ``make``
continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.measuring import ResourceWatch, disk_usage, write_json
from benchmarks.lib.provenance import ROOT, provenance

CORPUS = Path(os.environ.get("MEGATRON_DEBERTA_CORPUS", ROOT.parent / "shared" / "corpus"))
FILE_DOCUMENTS = 12_000
PASSAGE_WORDS = 900  # about 5 KB of text


@lru_cache(maxsize=1)
def read_passages() -> list[npt.NDArray[Any]]:
    """Return passages of the novels, each an array of words."""
    passages = []
    for path in sorted(CORPUS.glob("books-*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            for line in stream:
                words = np.array(json.loads(line)["text"].split(), dtype=object)
                passages += np.split(words, range(PASSAGE_WORDS, len(words), PASSAGE_WORDS))
    return [words for words in passages if len(words) > PASSAGE_WORDS // 3]


def document(file: int, number: int) -> tuple[str, str]:
    """Return the kind and the text of a document."""
    rng = random.Random(f"{file}/{number}")
    kind = rng.choices(("original", "exact", "near"), (8, 1, 1))[0]
    if kind == "original" or (file, number) == (0, 0):
        passages = read_passages()
        words = passages[rng.randrange(len(passages))]
        generator = np.random.Generator(np.random.PCG64([file, number]))
        return "original", " ".join(generator.permutation(words))
    source = rng.randrange(file * FILE_DOCUMENTS + number)
    _, text = document(*divmod(source, FILE_DOCUMENTS))
    if kind == "exact":
        return kind, text.upper()
    words = text.split()
    for position in rng.sample(range(len(words)), max(1, len(words) * 3 // 100)):
        words[position] = f"w{rng.randrange(10**6)}"
    return kind, " ".join(words)


def make(folder: Path, gigabytes: float) -> None:
    """Write files up to a total size."""
    folder.mkdir(parents=True, exist_ok=True)
    size = file = 0
    while size < gigabytes * 1e9:
        path = folder / f"part-{file:03d}.jsonl"
        if not path.exists():
            kinds: Counter[str] = Counter()
            unfinished = path.with_suffix(".tmp")
            with unfinished.open("w", encoding="utf-8") as stream:
                for number in range(FILE_DOCUMENTS):
                    kind, text = document(file, number)
                    kinds[kind] += 1
                    stream.write(json.dumps({"id": f"{file}/{number}", "text": text}) + "\n")
            path.with_suffix(".kinds").write_text(json.dumps(kinds))
            unfinished.rename(path)
        size += path.stat().st_size
        file += 1
        print(f"{path}: {size / 1e9:.2f} GB", flush=True)


def run(folder: Path, workers: int) -> dict[str, Any]:
    """Deduplicate the files that ``make`` wrote; return cost and result."""
    files = sorted(folder.glob("part-*.jsonl"))
    planted: Counter[str] = Counter()
    for path in files:
        planted.update(json.loads(path.with_suffix(".kinds").read_text()))
    output = folder / "deduplicated"
    for left in (output, Path(f"{output}.unfinished")):
        shutil.rmtree(left, ignore_errors=True)
    command = deduplicate_command(files, output, workers)
    begin = time.monotonic()
    stages: dict[str, float] = {}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        watch = ResourceWatch(process.pid, [output, Path(f"{output}.unfinished")])
        watch.start()
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", flush=True)
            words = line.split()
            if words[:1] == ["deduplicate:"]:
                stages.setdefault(words[1], round(time.monotonic() - begin, 1))
    watch.join()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads((output / "summary.json").read_text())
    return {
        "input_bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
        "workers": workers,
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - begin, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "seconds_at_first_line_of_stage": stages,
        "peak_memory_bytes": sum(watch.peaks.values()),
        "peak_memory_by_process": sorted(watch.peaks.values()),
        "peak_disk_bytes": watch.disk,
        "output_bytes": disk_usage(output),
        "planted": planted,
        "summary": {key: value for key, value in summary.items() if key != "sources"},
    }


def deduplicate_command(files: Iterable[Path], output: Path, workers: int) -> list[str]:
    """Return the command line."""
    return [
        *(sys.executable, "-m", "megatron_deberta", "deduplicate", "--input", *map(str, files)),
        *("--output", str(output), "--workers", str(workers)),
    ]


def long_documents() -> dict[str, Any]:
    """Deduplicate two documents close to the maximum size that differ in one word."""
    words = np.concatenate(read_passages())
    text = " ".join(np.random.default_rng(0).choice(words, 18_000_000))[:98_000_000]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "part-000.jsonl"
        with path.open("w", encoding="utf-8") as stream:
            for beginning in ("one ", "another "):
                stream.write(json.dumps({"text": beginning + text}, ensure_ascii=False) + "\n")
        size = path.stat().st_size // 2
        path.with_suffix(".kinds").write_text('{"original": 1, "near": 1}')
        return {"document_bytes": size, **run(Path(name), workers=1)}


def quality(workers: int) -> dict[str, Any]:
    """Deduplicate the evaluation set of planted pairs; count those found."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = CORPUS / "dedup_eval.jsonl.gz", Path(folder) / "out"
        subprocess.run(deduplicate_command([source], output, workers), check=True, cwd=ROOT)
        with gzip.open(source) as documents:
            names = [json.loads(line)["id"] for line in documents]
        return count_found(output, names, CORPUS / "dedup_eval.truth.tsv")


def count_found(output: Path, names: list[str], truth: Path) -> dict[str, Any]:
    """Compare the removed documents with the planted pairs.

    Returns:
        Per kind of pair, the numbers of planted and found pairs, in all and at a Jaccard similarity
        of at least 0.7; and removed documents that belong to no planted pair.
    """
    with (output / "removed.jsonl").open(encoding="utf-8") as stream:
        removed = {names[json.loads(line)["document"]] for line in stream}
    counts: dict[str, Counter[str]] = {}
    planted = set()
    with truth.open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            pair = {row["original"], row["duplicate"]}
            planted |= pair
            count = counts.setdefault(row["kind"], Counter())
            similar = float(row["jaccard_5gram"]) >= 0.7
            found = bool(pair & removed)
            count["pairs"] += 1
            count["found"] += found
            count["pairs_at_0.7"] += similar
            count["found_at_0.7"] += similar and found
    return {
        "kinds": counts,
        "removed": len(removed),
        "removed_without_duplicate": sorted(removed - planted),
    }


def sketches() -> dict[str, Any]:
    """Measure speed and estimation error of two MinHash libraries on the same hashes."""
    import datasketch

    from megatron_deberta.text.deduplicate.sign import PERMUTATIONS, make_sketches

    os.environ["RAYON_NUM_THREADS"] = "1"
    generator = np.random.default_rng(0)
    sets = []
    for _ in range(1000):
        values = generator.integers(0, 2**63, 1000).astype(np.uint64)
        # Pairs of a Jaccard similarity of 0.7.
        sets += [values[:850], values[150:]]

    def by_datasketch() -> npt.NDArray[Any]:
        rows = []
        for values in sets:
            sketch = datasketch.MinHash(PERMUTATIONS, hashfunc=int)
            sketch.update_batch((values >> np.uint64(31)).tolist())
            rows.append(sketch.hashvalues)
        return np.array(rows)

    true = 700 / 1000
    libraries = {}
    for name, make_all in (
        ("rensa", lambda: make_sketches(sets, 1)),
        ("datasketch", by_datasketch),
    ):
        make_all()
        begin = time.process_time()
        rows = make_all()
        seconds = time.process_time() - begin
        estimates = (rows[::2] == rows[1::2]).mean(axis=1)
        libraries[name] = {
            "hashes_per_second": sum(map(len, sets)) / seconds,
            "error": float(np.sqrt(np.mean((estimates - true) ** 2))),
        }
    return {"documents": len(sets), "permutations": PERMUTATIONS, "libraries": libraries}


def main() -> None:
    """Run a benchmark and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "run", "long", "quality", "sketches"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dedup"))
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.what == "make":
        make(args.folder, args.gigabytes)
        return
    actions: dict[str, Callable[[], dict[str, Any]]] = {
        "run": lambda: run(args.folder, args.workers),
        "long": long_documents,
        "quality": lambda: quality(args.workers),
        "sketches": sketches,
    }
    result = {**actions[args.what](), **provenance()}
    print(json.dumps(result, indent=2))
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
