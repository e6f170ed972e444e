"""Damage shards and record where the damage is detected.

``python -m tests.faults.shard_damage --output FILE.json`` writes the counts of the whole campaign:
300 mutations of ``.idx`` and 200 of ``.bin``, each a function of (seed, number).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.lib.provenance import provenance
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.shards.verify import ShardReport, verify_shards
from megatron_deberta.data.shards.writer import write_shard
from megatron_deberta.errors import DataError

IDX_MUTATIONS, BIN_MUTATIONS = 300, 200
SEED = 2026
VOCAB_SIZE = 5000


def make_shard(prefix: str) -> None:
    """Write a shard of 300 documents of one to four sentences, with a manifest."""
    generator = np.random.default_rng(SEED)
    documents = [
        [
            generator.integers(0, VOCAB_SIZE, generator.integers(1, 40))
            for _ in range(generator.integers(1, 5))
        ]
        for _ in range(300)
    ]
    write_shard(
        prefix,
        documents,
        np.uint16,
        tokenizer_fingerprint="tiny",
        tokenizer_path="tokenizer",
        vocab_size=VOCAB_SIZE,
        sources=("text.jsonl",),
    )


def mutate(content: bytes, number: int, kind: str) -> tuple[str, bytes]:
    """Return a mutation's name and the damaged bytes, which differ from the original."""
    rng = random.Random(f"{SEED} {kind} {number}")
    names = ["flip", "flip", "cut", "extend", "zero page", "overwrite", "repeat", "empty", "swap"]
    if kind == "idx":
        names += ["header", "header", "other endian"]
    damaged = content
    while damaged == content:
        name = rng.choice(names)
        damaged = _damage(name, bytearray(content), rng)
    return name, damaged


def _damage(name: str, damaged: bytearray, rng: random.Random) -> bytes:
    size = len(damaged)
    start = rng.randrange(size)
    length = min(rng.choice((1, 2, 8, 64, 4096)), size - start)
    part = slice(start, start + length)
    if name in ("flip", "header"):
        damaged[start if name == "flip" else rng.randrange(34)] ^= 1 << rng.randrange(8)
    elif name == "cut":
        del damaged[start:]
    elif name == "extend":
        damaged += rng.randbytes(length)
    elif name == "zero page":
        damaged[part] = bytes(length)
    elif name == "overwrite":
        damaged[part] = rng.randbytes(length)
    elif name == "repeat":
        damaged[start:start] = damaged[part]
    elif name == "swap":
        other_start = rng.randrange(size - length + 1)
        other = slice(other_start, other_start + length)
        damaged[part], damaged[other] = damaged[other], damaged[part]
    elif name == "other endian":
        damaged[18:26] = damaged[18:26][::-1]
    else:
        damaged.clear()
    return bytes(damaged)


def detected_by(prefix: str) -> str:
    """Open a damaged shard, then verify it.

    Returns:
        "open" or "verify", whichever first raised a typed error with the file name; else "nobody".
    """
    message = _opening_error(prefix)
    if message:
        assert message.startswith(prefix), message
        assert "\n" not in message
        return "open"
    reports: list[ShardReport] = []
    verify_shards([prefix], jobs=2, report=reports.append)
    if not reports[0].problems:
        return "nobody"
    assert all(problem.startswith(prefix) for problem in reports[0].problems), reports
    return "verify"


def _opening_error(prefix: str) -> str:
    try:
        IndexedDataset(prefix)
    except DataError as error:
        return str(error)
    return ""


def run_campaign(folder: Path, share: float = 1.0) -> dict[str, dict[str, int]]:
    """Damage a shard repeatedly; count by file kind where each mutation was detected."""
    prefix = str(folder / "shard")
    make_shard(prefix)
    counts: dict[str, dict[str, int]] = {}
    for kind, total in (("idx", IDX_MUTATIONS), ("bin", BIN_MUTATIONS)):
        path = Path(f"{prefix}.{kind}")
        original = path.read_bytes()
        detections: Counter[str] = Counter()
        for number in range(round(total * share)):
            name, damaged = mutate(original, number, kind)
            path.write_bytes(damaged)
            detections[f"{name}: {detected_by(prefix)}"] += 1
        path.write_bytes(original)
        counts[kind] = dict(sorted(detections.items()))
    return counts


def main() -> None:
    """Run the whole campaign and write its counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = run_campaign(Path(folder))
    totals = {
        kind: {
            detector: sum(n for name, n in detections.items() if name.endswith(f": {detector}"))
            for detector in ("open", "verify", "nobody")
        }
        for kind, detections in counts.items()
    }
    result = {"seed": SEED, "noticed_by": totals, "mutations": counts, **provenance()}
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
