"""Preprocess ten million short documents and novels, and compare the shards with megatron-core.

All lengths and document boundaries read by megatron-core's reader and by this project's are
compared, and the ids of sampled documents with the tokenizer's output for their text. In the other
direction, this project's reader reads a copy that megatron-core's builder wrote.

  python -m benchmarks.text.many_documents --corpus books-*.jsonl.gz --work /scratch
"""

from __future__ import annotations

import argparse
import gzip
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from megatron.core.datasets import indexed_dataset as megatron

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.text.preprocess import run_preprocess
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from megatron_deberta.tokenizer.training import train_sentencepiece

OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "many_documents.json"
# Documents generated at once, with a seed of their own.
BLOCK = 100_000


def draw_documents(words: Sequence[str], block: int) -> list[str]:
    """Generate a block of documents of 3 to 15 words."""
    generator = np.random.default_rng(block)
    ends = np.cumsum(generator.integers(3, 16, BLOCK)).tolist()
    drawn = [words[index] for index in generator.integers(0, len(words), ends[-1]).tolist()]
    return [" ".join(drawn[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def write_corpus(path: Path, words: Sequence[str], documents: int) -> None:
    """Write the documents as JSONL."""
    with path.open("wb") as stream:
        for block in range(documents // BLOCK):
            texts = draw_documents(words, block)
            stream.writelines(b'{"text":"%b"}\n' % text.encode() for text in texts)


def sample_documents(words: Sequence[str], documents: int) -> Iterator[tuple[int, str]]:
    """Generate numbers and texts of some documents of a few blocks again."""
    blocks = documents // BLOCK
    for block in sorted({0, blocks // 3, blocks - 1}):
        for index, text in enumerate(draw_documents(words, block)[::20]):
            yield block * BLOCK + 20 * index, text


def preprocess(path: Path, tokenizer: Path, output: Path) -> dict[str, Any]:
    """Run ``megatron-deberta preprocess``; return its cost."""
    shutil.rmtree(output.parent, ignore_errors=True)
    seconds, processor_seconds, peak_mib = run_preprocess(path, tokenizer, output)
    return {
        "input_MB": path.stat().st_size / 1e6,
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor_seconds, 1),
        "peak_MiB": round(peak_mib),
    }


def compare(
    prefix: str, tokenizer: Tokenizer, texts: Iterator[tuple[int, str]], num_copied: int
) -> dict[str, Any]:
    """Compare both readers on a shard, then on a copy of its beginning written by megatron-core.

    Raises:
        AssertionError: anything differs.
    """
    expected, dataset = megatron.IndexedDataset(prefix), IndexedDataset(prefix)
    assert np.array_equal(expected.sequence_lengths, dataset.sequence_lengths)
    assert np.array_equal(expected.document_indices, dataset.document_boundaries)
    num_compared = 0
    for number, text in texts:
        ids = tokenizer.encode_array(text)
        assert np.array_equal(expected[number], ids), number
        assert np.array_equal(dataset.document(number), ids), number
        num_compared += 1
    copy_prefix = f"{prefix}_copy"
    builder = megatron.IndexedDatasetBuilder(f"{copy_prefix}.bin", dtype=expected.index.dtype)
    for number in range(num_copied):
        document = expected[number]
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [document.size])
    builder.finalize(f"{copy_prefix}.idx")
    copy = IndexedDataset(copy_prefix)
    assert all(np.array_equal(copy.document(n), dataset.document(n)) for n in range(num_copied))
    return {
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "documents_compared": num_compared,
        "documents_written_by_megatron": num_copied,
    }


def main() -> None:
    """Compare on a corpus of tiny documents and on a corpus of novels."""
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
        "tiny": sample_documents(words, args.documents),
        "books": ((number, text) for number, text in enumerate(books) if number % 10 == 0),
    }
    results: dict[str, Any] = {"provenance": provenance()}
    for name, texts in corpora.items():
        output = work / "out" / name
        cost = preprocess(work / f"{name}.jsonl", work / "tokenizer", output)
        comparison = compare(f"{output}_text_document", tokenizer, texts, min(1_000, len(books)))
        results[name] = {**cost, **comparison}
        print(name, results[name], flush=True)
    assert results["tiny"]["documents"] == args.documents
    assert results["books"]["documents"] == len(books)
    write_json(args.output, results)


if __name__ == "__main__":
    main()
