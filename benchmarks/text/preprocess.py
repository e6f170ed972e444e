"""Preprocessing speed and memory of this project, the tokenizer libraries and Megatron-LM's script.

MB/s count raw text (the documents' bytes, without JSON) on two processes. Commands are timed with
start-up and with the input in the page cache; tokenizer libraries encode documents in memory, and
their start-up is not counted. "start-up" is a whole command on only as many documents as each
byte-pair run checks against the tokenizer. Short cases are measured in rounds. Cases already
measured with the same code are skipped. On a busy machine only processor seconds are comparable.

  python -m benchmarks.text.preprocess --corpus *.jsonl.gz --work /scratch --megatron Megatron-LM
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from benchmarks.lib.measuring import ResourceWatch, read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance, source_digest
from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.files import HashedFile, sha256_file
from megatron_deberta.text.preprocess.encoding import (
    PROBE_CHARACTERS,
    PROBE_DOCUMENTS,
    fast_bpe_encoder,
)
from megatron_deberta.text.preprocess.worker import ENCODED_BYTES
from megatron_deberta.text.readers.reading import RecordReader
from megatron_deberta.text.readers.records import ReadOptions, parse_records
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.tokenizer import load_tokenizer
from megatron_deberta.tokenizer.training import train_sentencepiece

OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "preprocess.json"
PROCESSES = 2
WARM_UP_TEXT = "Loads what is loaded late."
VOCABULARY = 32_000
ROUNDS = 9
WORD_LETTERS = 8
# The corpus repeated; from the second time on, its words are in every cache.
LARGE_MB = 2000
FILES = {"plain": "plain.jsonl", "gzip": "gzip.jsonl.gz", "zstd": "zstd.jsonl.zst"}
Encoder = Callable[[list[str]], object]
# Seconds, processor seconds and peak memory of all processes in MiB.
Usage = tuple[float, float, float]


def prepare(corpus: list[str], work: Path) -> list[str]:
    """Write the corpus plain and compressed, and train the tokenizers; return the texts."""
    lines = [line for path in corpus for line in gzip.open(path, "rb")]
    texts = [orjson.loads(line)["text"] for line in lines]
    work.mkdir(parents=True, exist_ok=True)
    content = b"".join(lines)
    compressions = (bytes, gzip.compress, zstandard.compress)
    for name, compress in zip(FILES.values(), compressions, strict=True):
        if not (work / name).exists():
            (work / name).write_bytes(compress(content))
    offsets = itertools.accumulate(map(len, texts[: PROBE_DOCUMENTS - 1]), initial=0)
    num_checked = sum(offset < PROBE_CHARACTERS for offset in offsets)
    (work / "first.jsonl").write_bytes(b"".join(lines[:num_checked]))
    if not (work / "unigram").exists():
        train_sentencepiece(texts[::10], str(work / "unigram"), vocab_size=VOCABULARY)
    if not (work / "gpt2").exists():
        train_byte_level(texts[::10], work / "gpt2")
    return texts


def train_byte_level(texts: list[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    folder.mkdir()
    backend.model.save(str(folder))


def new_words(work: Path) -> Path:
    """Write and return a file of random words, hardly any of which is repeated."""
    path = work / "new_words.jsonl"
    generator = np.random.default_rng(0)
    with path.open("wb") as stream:
        while stream.tell() < LARGE_MB * 1e6:
            letters = generator.integers(ord("a"), ord("z") + 1, 1 << 14, dtype=np.uint8)
            letters[:: WORD_LETTERS + 1] = ord(" ")
            stream.write(orjson.dumps({"text": letters.tobytes().decode()}) + b"\n")
    return path


def in_batches(texts: list[str]) -> Iterator[list[str]]:
    """Yield batches of the size that ``preprocess`` encodes at once."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= ENCODED_BYTES:
            yield batch
            batch = []
    yield batch


def encode_in_memory(make_encoder: Callable[[], Encoder], texts: list[str]) -> tuple[float, float]:
    """Return the seconds and processor seconds of encoding texts in ``PROCESSES`` processes."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES + 1)
    processor_time = context.Array("d", PROCESSES)

    def encode_share(index: int) -> None:
        encode = make_encoder()
        encode([WARM_UP_TEXT])
        batches = list(in_batches(texts[index::PROCESSES]))
        barrier.wait()
        begin = time.process_time()
        for batch in batches:
            encode(batch)
        processor_time[index] = time.process_time() - begin

    processes = [context.Process(target=encode_share, args=(index,)) for index in range(PROCESSES)]
    for process in processes:
        process.start()
    barrier.wait()
    begin = time.perf_counter()
    for process in processes:
        process.join()
    return time.perf_counter() - begin, sum(processor_time[:])


def sentencepiece_encoder(model: Path) -> Encoder:
    """Return SentencePiece's batch encoder."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return lambda texts: processor.encode(texts, num_threads=1)


def gigatoken_encoder(folder: Path) -> Encoder:
    """Return gigatoken's batch encoder."""
    import gigatoken

    spec = {**load_tokenizer(str(folder)).spec, "added_tokens": [], "post_processor": None}
    backend = gigatoken.Tokenizer.from_json(json.dumps(spec, ensure_ascii=False))
    return lambda texts: backend.encode_batch(texts, parallel=False)


def stages(path: Path, folder: Path) -> dict[str, float]:
    """Return processor seconds by stage of one process that turns a text file into a shard."""
    begin = time.process_time()
    tokenizer = load_tokenizer(str(folder))
    encode = (
        fast_bpe_encoder(tokenizer, dtype_for_vocab(tokenizer.vocab_size)) or tokenizer.encode_texts
    )
    encode([WARM_UP_TEXT])
    names = ("load tokenizer", "read", "parse", "encode", "write", "copy", "hash")
    spent = dict.fromkeys(names, 0.0)
    spent["load tokenizer"] = time.process_time() - begin
    last = time.process_time()

    def mark(name: str) -> None:
        nonlocal last
        now = time.process_time()
        spent[name] += now - last
        last = now

    part, copy = path.with_name("stages.bin"), path.with_name("stages.copy")
    for old in (part, copy):
        old.unlink(missing_ok=True)
    with contextlib.closing(HashedFile(part)) as stream:
        texts: list[str] = []
        for block in RecordReader(find_sources([str(path)])[0]).blocks(0):
            mark("read")
            documents, _ = parse_records(block.records, "jsonl", ReadOptions())
            texts += [document.texts[0] for document in documents]
            mark("parse")
            if sum(map(len, texts)) < ENCODED_BYTES:
                continue
            write_ids(stream, encode(texts)[0], mark)
            texts = []
        write_ids(stream, encode(texts)[0], mark)
        stream.commit()
        mark("write")
    # A copy is checked against the part's hash while it is read.
    sha256_file(part)
    shutil.copyfile(part, copy)
    mark("copy")
    sha256_file(part)
    mark("hash")
    return spent


def write_ids(stream: HashedFile, ids: Any, mark: Callable[[str], None]) -> None:
    """Write ids as a part has them."""
    mark("encode")
    stream.write(np.ascontiguousarray(ids, np.uint16).data)
    mark("write")


def run_command(arguments: list[str], path: Path, env: dict[str, str] | None = None) -> Usage:
    """Run a Python program on an input file that is in the page cache; return its usage.

    Raises:
        RuntimeError: the command failed; with the end of its error output.
    """
    with path.open("rb") as stream:
        while stream.read(1 << 20):
            pass
    command = [sys.executable, *arguments]
    env = dict(os.environ if env is None else env)
    # With this variable, every start would compile all modules again.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    begin, before = time.perf_counter(), os.times()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    watch = ResourceWatch(process.pid)
    watch.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - begin
    watch.join()
    if process.returncode:
        raise RuntimeError(f"{command}: {errors.decode()[-2000:]}")
    after = os.times()
    processor_seconds = after.children_user + after.children_system
    processor_seconds -= before.children_user + before.children_system
    return seconds, processor_seconds, sum(watch.peaks.values()) / 2**20


def run_preprocess(path: Path, tokenizer: Path, output: Path) -> Usage:
    """Run ``megatron-deberta preprocess``."""
    arguments = [
        "-m", "megatron_deberta", "preprocess", "--input", str(path), "--tokenizer", str(tokenizer),
        "--output", str(output), "--workers", str(PROCESSES),
    ]  # fmt: skip
    return run_command(arguments, path)


def run_megatron(root: Path, path: Path, model: Path, output: Path) -> Usage:
    """Run Megatron-LM's preprocessing script."""
    output.mkdir(exist_ok=True)
    arguments = [
        str(root / "tools" / "preprocess_data.py"), "--input", str(path),
        "--output-prefix", str(output / "m"), "--tokenizer-type", "SentencePieceTokenizer",
        "--tokenizer-model", str(model), "--workers", str(PROCESSES), "--log-interval", "1000000",
    ]  # fmt: skip
    return run_command(arguments, path, {**os.environ, "PYTHONPATH": str(root)})


class Cases:
    """All cases by name, in the order in which they are measured.

    Args:
        texts: the documents of the corpus.
        work: folder with the files that ``prepare`` wrote.
        megatron_folder: Megatron-LM's source; None leaves its cases out.
    """

    def __init__(self, texts: list[str], work: Path, megatron_folder: Path | None) -> None:
        self.by_name: dict[str, Callable[[], dict[str, Any]]] = {}
        self._texts, self._work = texts, work
        self._megabytes = sum(len(text.encode()) for text in texts) / 1e6
        unigram, gpt2 = work / "unigram", work / "gpt2"
        model = unigram / "spm.model"
        our_unigram, our_gpt2 = (partial(self._preprocess, folder) for folder in (unigram, gpt2))
        sentencepiece = partial(sentencepiece_encoder, model)
        gigatoken = partial(gigatoken_encoder, gpt2)
        self._add_in_memory("sentencepiece in memory", sentencepiece)
        self._add_in_memory(
            "our tokenizer in memory", lambda: load_tokenizer(str(unigram)).encode_texts
        )
        self._add_commands("ours, unigram", our_unigram, "plain", "gzip", "zstd", "start-up")
        self._add_stages("unigram")
        # Each in-memory peer runs beside the cases it is compared with: the machine's speed varies.
        self._add_in_memory("gigatoken in memory", gigatoken)
        self._add_commands("ours, gpt2", our_gpt2, "plain", "gzip", "zstd", "start-up")
        self._add_stages("gpt2")
        if megatron_folder is not None:
            script = partial(run_megatron, megatron_folder, model=model, output=work / "mlm")
            self._add_commands("Megatron-LM, unigram", script, "plain", "start-up", "2 GB")
        self._add_commands("ours, unigram", our_unigram, "20 MB", "2 GB")
        self._add_commands("ours, gpt2", our_gpt2, "2 GB")
        repeats = round(LARGE_MB / self._megabytes)
        self._add_in_memory("sentencepiece in memory, 2 GB", sentencepiece, repeats)
        self._add_commands("ours, gpt2", our_gpt2, "new words, 2 GB")
        self._add_in_memory("gigatoken in memory, 2 GB", gigatoken, repeats)

    def _add_in_memory(
        self, name: str, make_encoder: Callable[[], Encoder], repeats: int = 1
    ) -> None:
        self.by_name[name] = lambda: speed(
            repeats * self._megabytes, *encode_in_memory(make_encoder, self._texts * repeats)
        )

    def _add_commands(self, program: str, run: Callable[[Path], Usage], *inputs: str) -> None:
        def measure(name: str) -> dict[str, Any]:
            path, megabytes = self._input(name)
            return speed(megabytes, *run(path))

        for name in inputs:
            self.by_name[f"{program}, {name}"] = partial(measure, name)

    def _preprocess(self, tokenizer: Path, path: Path) -> Usage:
        # A new folder: ext4 is slow to create files in place of some that were just removed.
        return run_preprocess(path, tokenizer, self._work / "out" / f"{time.time_ns()}" / "c")

    def _add_stages(self, vocabulary: str) -> None:
        self.by_name[f"stages, {vocabulary}, one process"] = lambda: {
            "megabytes": self._megabytes,
            "processor_seconds": stages(self._work / FILES["plain"], self._work / vocabulary),
        }

    def _input(self, name: str) -> tuple[Path, float]:
        """Return an input file, written if it is missing, and its megabytes of text."""
        if name in FILES:
            return self._work / FILES[name], self._megabytes
        if name == "start-up":
            path = self._work / "first.jsonl"
            texts = (orjson.loads(line)["text"] for line in path.read_bytes().splitlines())
            return path, sum(len(text.encode()) for text in texts) / 1e6
        if name == "new words, 2 GB":
            return new_words(self._work), LARGE_MB
        megabytes = {"20 MB": 20, "2 GB": LARGE_MB}[name]
        return repeated(self._work, megabytes), megabytes


def speed(
    megabytes: float, seconds: float, processor_seconds: float, peak_mib: float | None = None
) -> dict[str, Any]:
    """Return the result of a case from its size, times and peak memory."""
    result = {
        "megabytes": megabytes,
        "seconds": seconds,
        "MB_per_second": megabytes / seconds,
        "processor_seconds": processor_seconds,
        "MB_per_processor_second": megabytes / processor_seconds,
    }
    return result if peak_mib is None else {**result, "peak_MiB": peak_mib}


def repeated(work: Path, megabytes: int) -> Path:
    """Return a file with whole lines of the corpus, repeated up to a size."""
    path = work / f"{megabytes}.jsonl"
    if not path.exists():
        content = (work / FILES["plain"]).read_bytes()
        with path.open("wb") as stream:
            while end := content.rfind(b"\n", 0, round(megabytes * 1e6) - stream.tell() + 1) + 1:
                stream.write(content[:end])
    return path


def in_rounds(
    measures: Mapping[str, Callable[[], dict[str, Any]]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure short cases in turns for ``ROUNDS`` rounds; yield the median run of each.

    Cases are compared within a round, because the machine's speed varies between rounds:
    ``all_processor_seconds`` are in the order of the rounds.
    """
    all_runs: dict[str, list[dict[str, Any]]] = {name: [] for name in measures}
    for number in range(ROUNDS):
        for name, measure in measures.items():
            all_runs[name].append(measure())
        print(f"round {number + 1} of {ROUNDS}", flush=True)
    for name, runs in all_runs.items():
        median = dict(sorted(runs, key=total_processor_seconds)[ROUNDS // 2])
        if "peak_MiB" in median:
            median["peak_MiB"] = statistics.median(run["peak_MiB"] for run in runs)
        yield name, {**median, "all_processor_seconds": list(map(total_processor_seconds, runs))}


def total_processor_seconds(run: dict[str, Any]) -> float:
    """Return the processor seconds of a run, summed over its stages."""
    seconds = run["processor_seconds"]
    return float(sum(seconds.values()) if isinstance(seconds, dict) else seconds)


def main() -> None:
    """Measure the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megatron", type=Path, help="folder of Megatron-LM's source")
    parser.add_argument("--only", nargs="+", default=[""], help="prefixes of case names")
    parser.add_argument("--again", action="store_true", help="repeat cases measured with this code")
    parser.add_argument("--prepare", action="store_true", help="only prepare the inputs")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    texts = prepare(args.corpus, args.work)
    if args.prepare:
        return
    results = read_json(args.output, {})
    missing = {
        name: measure
        for name, measure in Cases(texts, args.work, args.megatron).by_name.items()
        if name.startswith(tuple(args.only))
        and (args.again or results.get(name, {}).get("source") != source_digest())
    }
    long = {name: missing.pop(name) for name in list(missing) if name.endswith("2 GB")}
    for name, result in itertools.chain(
        in_rounds(missing) if missing else (), ((name, run()) for name, run in long.items())
    ):
        results[name] = {**result, **provenance()}
        print(name, {k: round(v, 2) for k, v in result.items() if isinstance(v, float)}, flush=True)
        write_json(args.output, results)
    shutil.rmtree(args.work / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
