"""Preprocess ten million short documents and novels, and compare the shards with megatron-core.

Every length, offset and document boundary that megatron-core reads from the shard is compared with
what our reader reads, and the ids of documents drawn at random with what the tokenizer gives for
their text; in the other direction ours reads a copy that megatron-core's builder wrote.

  python -m benchmarks.text.many_documents --corpus books-*.jsonl.gz --work /scratch
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from megatron.core.datasets import indexed_dataset as megatron

from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.text.preprocess import PROCESSES, run_command
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from megatron_deberta.tokenizer.training import train_sentencepiece

OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "many_documents.json"
BLOCK = 100_000
"""Documents drawn at once; a block can be drawn again by itself."""


def draw_documents(words: Sequence[str], block: int) -> list[str]:
    """Draw a block's documents, of 3 to 15 words."""
    draw = np.random.default_rng(block)
    ends = np.cumsum(draw.integers(3, 16, BLOCK)).tolist()
    drawn = [words[index] for index in draw.integers(0, len(words), ends[-1]).tolist()]
    return [" ".join(drawn[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def write_corpus(path: Path, words: Sequence[str], documents: int) -> None:
    """Write them as JSONL."""
    with path.open("wb") as stream:
        for block in range(documents // BLOCK):
            texts = draw_documents(words, block)
            stream.writelines(b'{"text":"%b"}\n' % text.encode() for text in texts)


def drawn_again(words: Sequence[str], documents: int) -> Iterator[tuple[int, str]]:
    """Documents of a few blocks, by their numbers."""
    blocks = documents // BLOCK
    for block in sorted({0, blocks // 3, blocks - 1}):
        for index, text in enumerate(draw_documents(words, block)[::20]):
            yield block * BLOCK + 20 * index, text


def preprocess(path: Path, tokenizer: Path, output: Path) -> dict[str, Any]:
    """Run the command."""
    shutil.rmtree(output.parent, ignore_errors=True)
    seconds, spent, peak = run_command(
        [
            sys.executable, "-m", "megatron_deberta", "preprocess", "--input", str(path),
            "--tokenizer", str(tokenizer), "--output", str(output), "--workers", str(PROCESSES),
        ]
    )  # fmt: skip
    return {
        "input_MB": path.stat().st_size / 1e6,
        "seconds": round(seconds, 1),
        "processor_seconds": round(spent, 1),
        "peak_MiB": round(peak),
    }


def compare(
    prefix: str, tokenizer: Tokenizer, texts: Iterator[tuple[int, str]], copied: int
) -> dict[str, Any]:
    """Read a shard with megatron-core and ours, and the beginning of it written by megatron-core.

    Raises:
        AssertionError: anything differs.
    """
    theirs, ours = megatron.IndexedDataset(prefix), IndexedDataset(prefix)
    assert np.array_equal(theirs.sequence_lengths, ours.sequence_lengths)
    assert np.array_equal(theirs.document_indices, ours.document_boundaries)
    compared = 0
    for number, text in texts:
        ids = tokenizer.encode_array(text)
        assert np.array_equal(theirs[number], ids), number
        assert np.array_equal(ours.document(number), ids), number
        compared += 1
    copy = f"{prefix}_copy"
    builder = megatron.IndexedDatasetBuilder(f"{copy}.bin", dtype=theirs.index.dtype)
    for number in range(copied):
        document = theirs[number]
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [document.size])
    builder.finalize(f"{copy}.idx")
    again = IndexedDataset(copy)
    assert all(np.array_equal(again.document(n), ours.document(n)) for n in range(copied))
    return {
        "documents": ours.num_documents,
        "tokens": ours.num_tokens,
        "documents_compared": compared,
        "documents_written_by_megatron": copied,
    }


def main() -> None:
    """Do both corpora."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    books = [orjson.loads(line)["text"] for path in args.corpus for line in gzip.open(path, "rb")]
    if not (work / "tokenizer").exists():
        train_sentencepiece(books[::40], str(work / "tokenizer"), vocab_size=8_000)
    tokenizer = load_tokenizer(str(work / "tokenizer"))
    words = sorted({word for text in books[:50] for word in text.split() if word.isalpha()})
    write_corpus(work / "tiny.jsonl", words, args.documents)
    (work / "books.jsonl").write_bytes(b"".join(orjson.dumps({"text": t}) + b"\n" for t in books))
    corpora = {
        "tiny": drawn_again(words, args.documents),
        "books": ((number, text) for number, text in enumerate(books) if number % 10 == 0),
    }
    results: dict[str, Any] = {"provenance": provenance()}
    for name, texts in corpora.items():
        output = work / "out" / name
        cost = preprocess(work / f"{name}.jsonl", work / "tokenizer", output)
        copied = min(1_000, len(books))
        found = compare(f"{output}_text_document", tokenizer, texts, copied)
        results[name] = {**cost, **found}
        print(name, results[name], flush=True)
    assert results["tiny"]["documents"] == args.documents
    assert results["books"]["documents"] == len(books)
    args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
