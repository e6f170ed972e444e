"""Speed and memory of ``split``, ``merge`` and ``train-tokenizer``, for ``--estimate``.

All commands run with one worker, start-up included.

    python -m benchmarks.text.deduplicate make --folder /tmp/dedup300 --gigabytes 0.3
    python -m benchmarks.text.commands --folder /tmp/dedup300 \
        --corpus ../shared/corpus/books-*.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.text.preprocess import run_command

OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "text_commands.json"
# Samples of real text on which SentencePiece trains
SAMPLES_MB = (10, 60)
VOCABULARY = 30_000


def run(*arguments: object) -> dict[str, float]:
    """Run a command; return seconds, processor seconds and peak memory."""
    line = ["-m", "megatron_deberta", *map(str, arguments), "--workers", "1"]
    seconds, processor_seconds, peak_mib = run_command(line, Path("/dev/null"))
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor_seconds, 2),
        "peak_MiB": round(peak_mib, 1),
    }


def measure(folder: Path, corpus: list[str], work: Path) -> dict[str, Any]:
    """Measure all commands.

    Args:
        folder: of generated text.
        corpus: files of real text.
        work: empty folder.
    """
    files = sorted(folder.glob("part-*.jsonl"))
    cases: dict[str, dict[str, float]] = {}
    cases["split"] = run("split", "--input", *files, "--output", work / "parted")
    for megabytes in SAMPLES_MB:
        cases[f"train-tokenizer {megabytes} MB"] = run(
            "train-tokenizer", "--input", *corpus, "--sample-mb", megabytes, "--vocab-size",
            VOCABULARY, "--output", work / f"tokenizer-{megabytes}",
        )  # fmt: skip
    shards = [work / "shards" / str(number) for number in range(2)]
    for number, shard in enumerate(shards):
        run(
            "preprocess", "--input", *files[number::2], "--output", shard,
            "--tokenizer", work / f"tokenizer-{SAMPLES_MB[0]}",
        )  # fmt: skip
    prefixes = [f"{shard}_text_document" for shard in shards]
    cases["merge"] = run("merge", *prefixes, "--output", work / "merged")
    return {
        "text_bytes": sum(path.stat().st_size for path in files),
        "shard_bytes": sum(path.stat().st_size for path in work.glob("merged.*")),
        "cases": cases,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of generated text")
    parser.add_argument("--corpus", nargs="+", required=True, help="real text")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        result = {**measure(args.folder, args.corpus, Path(work)), **provenance()}
    print(json.dumps(result, indent=1))
    write_json(args.output, result)


if __name__ == "__main__":
    main()
