"""Speed of the data loader, cost of the dataset indices, and masks against the released algorithm.

    python -m benchmarks.data.dataset loader --books PREFIX --tokenizer DIR --scratch D --output F
    python -m benchmarks.data.dataset index --documents 10000000 --scratch DIR --output FILE
    python -m benchmarks.data.dataset masking --books PREFIX --tokenizer DIR --output FILE

PREFIX is a shard of sentences (docs/data.md), which all four formats can read. Speed is measured in
processor time of one process, so it is per core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import shutil
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.released_masking import Text, released_masks
from benchmarks.lib.measuring import anonymous_bytes, read_json, write_json
from benchmarks.lib.provenance import provenance, source_digest
from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data.collate import BatchBuilder
from megatron_deberta.data.dataset.blend import BlendedRows
from megatron_deberta.data.dataset.corpus import Corpus, split_validation
from megatron_deberta.data.dataset.index_cache import IndexCache
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.masking import Masker
from megatron_deberta.data.randomness import Purpose
from megatron_deberta.data.shards.format import HEADER, MAGIC, VERSION
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.tokenizer import load_tokenizer

# Tokens per second that the 1.5B model needs on one H200 (DESIGN section 10).
H200_TOKENS = 45_000
# Format -> tokens per row.
FORMATS = {"full_sentences": 512, "doc_sentences": 512, "segment_pair": 512, "sentence_pair": 128}
# Source sizes as weights, whose pattern is too long for one table.
BLEND_WEIGHTS = (77_139_753, 2_901_113, 1_102_017)
ROUNDS = 9
TOKENS = 64


def synthetic_shard(prefix: Path, num_documents: int) -> None:
    """Write documents of 1 to 4 sentences of 3 to 9 random tokens, vectorised."""
    generator = np.random.default_rng(0)
    boundaries = np.concatenate([[0], np.cumsum(generator.integers(1, 5, num_documents))])
    lengths = generator.integers(3, 10, int(boundaries[-1]), dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    with Path(f"{prefix}.bin").open("wb") as stream:
        for begin in range(0, int(ends[-1]), 1 << 24):
            size = min(1 << 24, int(ends[-1]) - begin)
            stream.write(generator.integers(5, TOKENS - 1, size, dtype=np.uint16).tobytes())
    with Path(f"{prefix}.idx").open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, 8, lengths.size, boundaries.size))
        for array in (lengths, (ends - lengths) * 2, boundaries.astype(np.int64)):
            stream.write(array.tobytes())


def synthetic_vocabulary() -> Vocabulary:
    """Return a vocabulary of the synthetic tokens, of which every third continues a word."""
    return Vocabulary(
        size=TOKENS,
        num_tokens=TOKENS,
        pad_id=0,
        cls_id=1,
        sep_id=2,
        mask_id=TOKENS - 1,
        special_ids=(0, 1, 2, 3, TOKENS - 1),
        word_starts=np.arange(TOKENS) % 3 != 0,
        fingerprint="synthetic",
    )


@dataclass
class LoaderCase:
    """A loader setting and its measured speed per round."""

    setting: dict[str, Any]
    builder: BatchBuilder
    rates: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_positions: int = 0
    num_samples: int = 0

    def measure(self) -> None:
        """Time batches for a quarter of a second."""
        micro_batch = self.setting["micro_batch"]
        start, masks = time.process_time(), []
        while (seconds := time.process_time() - start) < 0.25:
            samples = range(self.num_samples, self.num_samples + micro_batch)
            masks.append(self.builder.build(samples).inputs.is_token)
            self.num_samples += micro_batch
        num_tokens = sum(int(mask.sum()) for mask in masks)
        self.num_positions += sum(mask.numel() for mask in masks)
        self.num_tokens += num_tokens
        self.rates.append(num_tokens / seconds)

    def report(self) -> dict[str, Any]:
        """Return the setting, the median and the slowest speed."""
        rate = statistics.median(self.rates)
        filled = self.num_tokens / self.num_positions
        return {
            **self.setting,
            "tokens_per_second": round(rate),
            "slowest": round(min(self.rates)),
            "times_h200": round(rate / H200_TOKENS, 1),
            "row_filled": round(filled, 3),
            "rows_per_second": round(rate / (filled * self.setting["sequence_length"])),
        }


def loader_cases(
    name: str,
    corpus: Corpus,
    vocabulary: Vocabulary,
    cache: IndexCache,
    weights: Sequence[int] = (),
) -> Iterator[LoaderCase]:
    """Yield cases of each format, masking and micro batch size.

    With weights, that many sources are blended, each the same corpus in another order.
    """
    average = round(corpus.num_tokens / len(corpus), 1)
    for masking, micro_batch, packing in itertools.product(
        ("uniform", "microsoft"), (8, 64), FORMATS
    ):
        length = FORMATS[packing]
        sources = [
            PackedRows(corpus, vocabulary, length, packing, seed, cache=cache)
            for seed in range(1, 1 + max(1, len(weights)))
        ]
        rows = BlendedRows(sources, weights) if weights else sources[0]
        objective = ObjectiveConfig(masking=masking)  # type: ignore[arg-type]
        masker = Masker(objective, vocabulary, length, 1, Purpose.TRAINING_MASK)
        builder = BatchBuilder(rows, masker, vocabulary, length, True)
        builder.build(range(micro_batch))
        setting = {
            "corpus": name,
            "tokens_a_document": average,
            "packing": packing,
            "sequence_length": length,
            "micro_batch": micro_batch,
            "masking": masking,
        }
        yield LoaderCase(setting, builder)


def loader(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both corpora and a blend, in turns."""
    tokenizer = Vocabulary.of(load_tokenizer(args.tokenizer))
    prefix = Path(args.scratch) / "synthetic_sentence"
    if not Path(f"{prefix}.idx").exists():
        synthetic_shard(prefix, args.documents)
    cache = IndexCache(Path(args.scratch) / "index")
    books = Corpus([IndexedDataset(args.books)], cache=cache)
    synthetic = Corpus([IndexedDataset(str(prefix))], cache=cache)
    cases = [
        *loader_cases("books", books, tokenizer, cache),
        *loader_cases("books, a blend of three", books, tokenizer, cache, BLEND_WEIGHTS),
        *loader_cases(
            f"{args.documents:,} synthetic documents", synthetic, synthetic_vocabulary(), cache
        ),
    ]
    for number in range(ROUNDS):
        for case in cases:
            case.measure()
        print(f"round {number + 1} of {ROUNDS}", flush=True)
    results = [case.report() for case in cases]
    for result in results:
        print(json.dumps(result), flush=True)
    return {"h200_tokens_per_second": H200_TOKENS, "rounds": ROUNDS, "results": results}


def in_own_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run a function in a new process; add its time and peak anonymous memory to the result."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, work, arguments))
    process.start()
    result: dict[str, Any] = receiver.recv()
    process.join()
    return result


def _report(sender: Any, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    peak, done, base = [0], threading.Event(), anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    start, cpu_start = time.perf_counter(), time.process_time()
    result = work(*arguments)
    result["seconds"] = round(time.perf_counter() - start, 3)
    result["cpu_seconds"] = round(time.process_time() - cpu_start, 3)
    done.set()
    thread.join()
    sender.send({**result, "own_memory_mib": round((peak[0] - base) / 2**20, 1)})


def open_rows(prefix: str, cache: str, packing: str, split: bool) -> dict[str, Any]:
    """Open the dataset as a training rank does and read the first batch."""
    indices = IndexCache(cache)
    shard = IndexedDataset(prefix)
    corpus = (
        split_validation([shard], 0.05, 1, indices)[0] if split else Corpus([shard], cache=indices)
    )
    vocabulary = synthetic_vocabulary()
    rows = PackedRows(corpus, vocabulary, FORMATS[packing], packing, 1, cache=indices)
    batch = rows.rows(np.arange(64))
    return {"documents": len(corpus), "rows": rows.rows_per_epoch, "tokens": int(batch.sizes.sum())}


def index(args: argparse.Namespace) -> dict[str, Any]:
    """Build and open the indices of every format over many small documents.

    Cases already measured with the same code are skipped.
    """
    scratch = Path(args.scratch)
    earlier = read_json(args.output, {})
    is_current = earlier.get("provenance", {}).get("source") == source_digest()
    results = earlier["results"] if is_current else []
    done = {(result["documents"], result["packing"]) for result in results}
    for documents in (args.documents, args.documents // 10):
        prefix = scratch / f"documents-{documents}_sentence"
        for packing in FORMATS:
            if (documents, packing) in done:
                continue
            if not Path(f"{prefix}.idx").exists():
                synthetic_shard(prefix, documents)
            results.append(measure_index(prefix, scratch / "cache", documents, packing))
            print(json.dumps(results[-1]), flush=True)
            write(args, {**SYNTHETIC, "results": results})
        for suffix in (".bin", ".idx"):
            Path(f"{prefix}{suffix}").unlink(missing_ok=True)
    return {**SYNTHETIC, "results": results}


def measure_index(prefix: Path, cache: Path, documents: int, packing: str) -> dict[str, Any]:
    """Build the index of a format, then open it again."""
    shutil.rmtree(cache, ignore_errors=True)
    arguments = (str(prefix), str(cache), packing, False)
    built = in_own_process(open_rows, *arguments)
    opened = in_own_process(open_rows, *arguments)
    size = sum(path.stat().st_size for path in cache.rglob("*.bin"))
    shutil.rmtree(cache)
    return {
        "documents": documents,
        "packing": packing,
        "rows_an_epoch": built["rows"],
        "build": {key: built[key] for key in MEASURED},
        "open": {key: opened[key] for key in MEASURED},
        "index_bytes_a_document": round(size / documents, 2),
        "build_ns_a_document": round(built["cpu_seconds"] / documents * 1e9),
    }


SYNTHETIC = {"sentences_a_document": 2.5, "tokens_a_document": 15}
MEASURED = ("seconds", "cpu_seconds", "own_memory_mib")


def masking(args: argparse.Namespace) -> dict[str, Any]:
    """Compare masks of real rows with the released algorithm's."""
    vocabulary = Vocabulary.of(load_tokenizer(args.tokenizer))
    corpus = Corpus([IndexedDataset(args.books)])
    length = 512
    rows = PackedRows(corpus, vocabulary, length, "full_sentences", 1)
    objective = ObjectiveConfig(masking="microsoft")
    masker = Masker(objective, vocabulary, length, 1, Purpose.TRAINING_MASK)
    assert vocabulary.single_marks is not None
    text = Text(
        vocabulary.is_special.tolist(),
        (vocabulary.word_starts | vocabulary.single_marks).tolist(),
        vocabulary.mask_id,
        vocabulary.num_tokens,
    )
    random_numbers = random.Random(0)
    ours, release = MaskStatistics(length), MaskStatistics(length)
    for sample in range(args.rows):
        batch = rows.rows(np.array([sample % (rows.rows_per_epoch - 1)]))
        if batch.tokens.size != length:
            continue
        masked = masker(batch.tokens, batch.sizes, np.array([sample]))
        ours.add(batch.tokens, masked.tokens, masked.positions, vocabulary)
        tokens, positions = released_masks(batch.tokens.tolist(), text, random_numbers)
        release.add(batch.tokens, np.array(tokens), np.array(positions), vocabulary)
    difference = {
        name: max(abs(a - b) for a, b in zip(ours.report()[name], values, strict=True))
        for name, values in release.report().items()
    }
    report = {
        "rows": ours.rows,
        "ours": ours.report(),
        "release": release.report(),
        "largest_difference_in_points": {k: round(100 * v, 3) for k, v in difference.items()},
    }
    print(json.dumps(report, indent=1))
    return report


class MaskStatistics:
    """Masking rates over many rows of one length."""

    def __init__(self, length: int) -> None:
        self.rows = 0
        self._targets = np.zeros(length)
        self._words: Counter[int] = Counter()
        self._replacements = np.zeros(3)

    def add(
        self,
        tokens: np.ndarray[Any, Any],
        masked: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        vocabulary: Vocabulary,
    ) -> None:
        """Count a row."""
        self.rows += 1
        self._targets[positions] += 1
        # Words in each run of neighbouring targets; adjacent n-grams count as one run.
        begins = vocabulary.word_starts[tokens[positions]]
        breaks = np.append(True, np.diff(positions) > 1)
        runs = np.add.reduceat((begins | breaks).astype(int), np.flatnonzero(breaks))
        self._words.update(np.minimum(runs, 4).tolist())
        after, before = masked[positions], tokens[positions]
        is_mask, is_kept = after == vocabulary.mask_id, after == before
        self._replacements += [is_mask.sum(), is_kept.sum(), (~is_mask & ~is_kept).sum()]

    def report(self) -> dict[str, list[float]]:
        """Return the rates."""
        num_runs = sum(self._words.values())
        return {
            "rate_by_eighth": (self._targets.reshape(8, -1).mean(axis=1) / self.rows).tolist(),
            "rate_of_last_16": [float(self._targets[-16:].mean() / self.rows)],
            "runs_of_1_2_3_more_words": [self._words[size] / num_runs for size in (1, 2, 3, 4)],
            "masked_kept_random": (self._replacements / self._replacements.sum()).tolist(),
        }


def main() -> int:
    """Run one part and write its file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=["loader", "index", "masking"])
    parser.add_argument("--books", default="", help="shard of sentences of real text")
    parser.add_argument("--tokenizer", default="", help="the books' tokenizer")
    parser.add_argument("--documents", type=int, default=10_000_000, help="synthetic documents")
    parser.add_argument("--rows", type=int, default=10_000, help="rows masked")
    parser.add_argument("--scratch", default="", help="folder for large files")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    parts = {"loader": loader, "index": index, "masking": masking}
    write(args, parts[args.part](args))
    return 0


def write(args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write the result file."""
    write_json(args.output, {"provenance": provenance(), "part": args.part, **content})


if __name__ == "__main__":
    raise SystemExit(main())
