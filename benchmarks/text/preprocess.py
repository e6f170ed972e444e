"""Preprocessing speed and memory: ours, the bare tokenizers, and Megatron-LM's script.

MB/s are of raw text (the documents' bytes, without JSON), on two processes; ours are whole
commands, start-up included, with the input in the page cache, while the bare tokenizers have the
documents in memory and their start-up is not counted; "start-up" is a whole command for as many
documents as each run over byte pairs checks against the tokenizer. Short cases are measured in
rounds; one that this very code was measured with is not measured again. On a machine that does
other work as well, only processor seconds compare.

  python -m benchmarks.text.preprocess --corpus *.jsonl.gz --work /scratch --megatron Megatron-LM
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from benchmarks.lib.measuring import ResourceWatch
from benchmarks.lib.provenance import ROOT, provenance, source_digest
from megatron_deberta.text.preprocess.direct_io import (
    DirectWriter,
    copy_direct,
    new_buffer,
    sha256_direct,
)
from megatron_deberta.text.preprocess.encoding import (
    PROBE_CHARACTERS,
    PROBE_DOCUMENTS,
    fast_bpe_encoder,
)
from megatron_deberta.text.preprocess.worker import ENCODED_BYTES
from megatron_deberta.text.readers.cutting import RecordReader
from megatron_deberta.text.readers.records import parse_records
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.tokenizer import load_tokenizer
from megatron_deberta.tokenizer.training import train_sentencepiece

OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "preprocess.json"
PROCESSES = 2
VOCABULARY = 32_000
ROUNDS = 9
WORD_LETTERS = 8
LARGE_MB = 2000
"""The corpus over and over: what is met a second time is in every cache."""


def prepare(corpus: list[str], work: Path) -> list[str]:
    """Write the corpus plain and compressed, and train the tokenizers; return the texts."""
    lines = [line for path in corpus for line in gzip.open(path, "rb")]
    texts = [orjson.loads(line)["text"] for line in lines]
    work.mkdir(parents=True, exist_ok=True)
    content = b"".join(lines)
    for name, encode in (
        ("plain.jsonl", bytes),
        ("gzip.jsonl.gz", gzip.compress),
        ("zstd.jsonl.zst", zstandard.compress),
    ):
        if not (work / name).exists():
            (work / name).write_bytes(encode(content))
    begins = itertools.accumulate(map(len, texts[: PROBE_DOCUMENTS - 1]), initial=0)
    checked = sum(begin < PROBE_CHARACTERS for begin in begins)
    (work / "first.jsonl").write_bytes(b"".join(lines[:checked]))
    if not (work / "unigram").exists():
        train_sentencepiece(texts[::10], str(work / "unigram"), vocab_size=VOCABULARY)
    if not (work / "gpt2").exists():
        train_byte_level(texts[::10], work / "gpt2")
    return texts


def train_byte_level(texts: list[str], folder: Path) -> None:
    """Learn a vocabulary of GPT-2's kind."""
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
    """Return documents of random words, hardly one of which comes again."""
    path = work / "new_words.jsonl"
    draw = np.random.default_rng(0)
    with path.open("wb") as stream:
        while stream.tell() < LARGE_MB * 1e6:
            letters = draw.integers(ord("a"), ord("z") + 1, 1 << 14, dtype=np.uint8)
            letters[:: WORD_LETTERS + 1] = ord(" ")
            stream.write(orjson.dumps({"text": letters.tobytes().decode()}) + b"\n")
    return path


def in_batches(texts: list[str]) -> Iterator[list[str]]:
    """Cut texts into batches as large as ours are."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= ENCODED_BYTES:
            yield batch
            batch = []
    yield batch


def in_memory(
    make: Callable[[], Callable[[list[str]], object]], texts: list[str]
) -> tuple[float, float]:
    """Seconds, and processor seconds, in which two processes encode the texts they hold."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES + 1)
    spent = context.Array("d", PROCESSES)

    def work(index: int) -> None:
        encode = make()
        encode(["Loads what is loaded late."])
        batches = list(in_batches(texts[index::PROCESSES]))
        barrier.wait()
        begin = time.process_time()
        for some in batches:
            encode(some)
        spent[index] = time.process_time() - begin

    processes = [context.Process(target=work, args=(index,)) for index in range(PROCESSES)]
    for process in processes:
        process.start()
    barrier.wait()
    begin = time.perf_counter()
    for process in processes:
        process.join()
    return time.perf_counter() - begin, sum(spent[:])


def sentencepiece_encoder(model: Path) -> Callable[[list[str]], object]:
    """Return SentencePiece's own way."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return lambda texts: processor.encode(texts, num_threads=1)


def gigatoken_encoder(folder: Path) -> Callable[[list[str]], object]:
    """Return gigatoken's own way."""
    import gigatoken

    spec = {**load_tokenizer(str(folder)).spec, "added_tokens": [], "post_processor": None}
    backend = gigatoken.Tokenizer.from_json(json.dumps(spec, ensure_ascii=False))
    return lambda texts: backend.encode_batch(texts, parallel=False)


def stages(path: Path, folder: Path) -> dict[str, float]:
    """Processor seconds of one process for each stage from a file of text to a hashed shard."""
    begin = time.process_time()
    tokenizer = load_tokenizer(str(folder))
    encode = fast_bpe_encoder(tokenizer) or tokenizer.encode_texts
    encode(["Loads what is loaded late."])
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
    with DirectWriter(part, new_buffer()) as stream:
        texts: list[str] = []
        for block in RecordReader(find_sources([str(path)])[0]).blocks(0):
            mark("read")
            documents, _ = parse_records(block.records, "jsonl", ["text"])
            texts += [document.texts[0] for document in documents]
            mark("parse")
            if sum(map(len, texts)) < ENCODED_BYTES:
                continue
            write_ids(stream, encode(texts)[0], mark)
            texts = []
        write_ids(stream, encode(texts)[0], mark)
        stream.flush()
        mark("write")
    copy_direct(part, part.stat().st_size, copy, 0, (new_buffer(), new_buffer()))
    mark("copy")
    sha256_direct(copy)
    mark("hash")
    return spent


def write_ids(stream: DirectWriter, ids: Any, mark: Callable[[str], None]) -> None:
    """Write ids as a part has them."""
    mark("encode")
    stream.write(np.ascontiguousarray(ids, np.uint16).data)
    mark("write")


def read_through(path: Path) -> None:
    """Have a file in the page cache: the disk is not what is compared."""
    with path.open("rb") as stream:
        while stream.read(1 << 20):
            pass


def run_command(line: list[str], env: dict[str, str] | None = None) -> tuple[float, float, float]:
    """Run a command; return its seconds, processor seconds and the peak memory of all, MiB."""
    env = dict(os.environ if env is None else env)
    # With it every start compiles our modules anew, unlike a user's.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    begin, before = time.perf_counter(), os.times()
    process = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    watch = ResourceWatch(process.pid)
    watch.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - begin
    watch.join()
    if process.returncode:
        raise RuntimeError(f"{line}: {errors.decode()[-2000:]}")
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    return seconds, spent, sum(watch.peaks.values()) / 2**20


def ours(path: Path, tokenizer: Path, output: Path) -> tuple[float, float, float]:
    """Run our command; see ``run_command``."""
    read_through(path)
    # A folder of its own: ext4 goes round the inodes of files that have just been removed.
    prefix = output / f"{time.time_ns()}" / "c"
    line = [
        sys.executable, "-m", "megatron_deberta", "preprocess", "--input", str(path),
        "--tokenizer", str(tokenizer), "--output", str(prefix), "--workers", str(PROCESSES),
    ]  # fmt: skip
    return run_command(line)


def megatron(root: Path, path: Path, model: Path, output: Path) -> tuple[float, float, float]:
    """Run Megatron-LM's script; see ``run_command``."""
    read_through(path)
    output.mkdir(exist_ok=True)
    line = [
        sys.executable, str(root / "tools" / "preprocess_data.py"), "--input", str(path),
        "--output-prefix", str(output / "m"), "--tokenizer-type", "SentencePieceTokenizer",
        "--tokenizer-model", str(model), "--workers", str(PROCESSES), "--log-interval", "1000000",
    ]  # fmt: skip
    return run_command(line, {**os.environ, "PYTHONPATH": str(root)})


def cases(texts: list[str], args: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what can be measured, by name."""
    work: Path = args.work
    size = sum(len(text.encode()) for text in texts) / 1e6
    first = (work / "first.jsonl").read_bytes().splitlines()
    first_size = sum(len(orjson.loads(line)["text"].encode()) for line in first) / 1e6

    def speed(
        seconds: float, spent: float, peak: float | None = None, megabytes: float = size
    ) -> dict[str, Any]:
        found = {
            "megabytes": megabytes,
            "seconds": seconds,
            "MB_per_second": megabytes / seconds,
            "processor_seconds": spent,
            "MB_per_processor_second": megabytes / spent,
        }
        return found if peak is None else {**found, "peak_MiB": peak}

    def repeated(megabytes: int) -> Path:
        path = work / f"{megabytes}.jsonl"
        if not path.exists():
            content = (work / "plain.jsonl").read_bytes()
            with path.open("wb") as stream:
                while stream.tell() < megabytes * 1e6:
                    end = content.rfind(b"\n", 0, round(megabytes * 1e6) - stream.tell() + 1) + 1
                    if not end:
                        break
                    stream.write(content[:end])
        return path

    def over_and_over(kind: str, megabytes: int) -> dict[str, Any]:
        found = ours(repeated(megabytes), work / kind, work / "out")
        return speed(*found, megabytes=megabytes)

    def large_in_memory(make: Callable[[], Callable[[list[str]], object]]) -> dict[str, Any]:
        times = round(LARGE_MB / size)
        return speed(*in_memory(make, texts * times), megabytes=times * size)

    unigram, gpt2 = work / "unigram", work / "gpt2"
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "sentencepiece in memory": lambda: speed(
            *in_memory(lambda: sentencepiece_encoder(unigram / "spm.model"), texts)
        ),
        "our tokenizer in memory": lambda: speed(
            *in_memory(lambda: load_tokenizer(str(unigram)).encode_texts, texts)
        ),
    }

    def add_ours(kind: str) -> None:
        for name in ("plain.jsonl", "gzip.jsonl.gz", "zstd.jsonl.zst"):
            found[f"ours, {kind}, {name.split('.')[0]}"] = lambda name=name: speed(  # type: ignore[misc]
                *ours(work / name, work / kind, work / "out")
            )
        found[f"ours, {kind}, start-up"] = lambda: speed(
            *ours(work / "first.jsonl", work / kind, work / "out"), megabytes=first_size
        )
        found[f"stages, {kind}, one process"] = lambda: {
            "megabytes": size,
            "processor_seconds": stages(work / "plain.jsonl", work / kind),
        }

    # Each in-memory peer beside what is compared with it: the machine's speed changes.
    add_ours("unigram")
    found["gigatoken in memory"] = lambda: speed(*in_memory(lambda: gigatoken_encoder(gpt2), texts))
    add_ours("gpt2")
    if args.megatron is not None:
        found["Megatron-LM, unigram, plain"] = lambda: speed(
            *megatron(args.megatron, work / "plain.jsonl", unigram / "spm.model", work / "mlm")
        )
        found["Megatron-LM, unigram, start-up"] = lambda: speed(
            *megatron(args.megatron, work / "first.jsonl", unigram / "spm.model", work / "mlm"),
            megabytes=first_size,
        )
        found["Megatron-LM, unigram, 2 GB"] = lambda: speed(
            *megatron(args.megatron, repeated(LARGE_MB), unigram / "spm.model", work / "mlm"),
            megabytes=LARGE_MB,
        )
    found["ours, unigram, 20 MB"] = lambda: over_and_over("unigram", 20)
    for kind in ("unigram", "gpt2"):
        found[f"ours, {kind}, 2 GB"] = lambda kind=kind: over_and_over(kind, LARGE_MB)  # type: ignore[misc]
    found["sentencepiece in memory, 2 GB"] = lambda: large_in_memory(
        lambda: sentencepiece_encoder(unigram / "spm.model")
    )
    found["ours, gpt2, new words, 2 GB"] = lambda: speed(
        *ours(new_words(work), gpt2, work / "out"), megabytes=LARGE_MB
    )
    found["gigatoken in memory, 2 GB"] = lambda: large_in_memory(lambda: gigatoken_encoder(gpt2))
    return found


def in_rounds(
    measures: Mapping[str, Callable[[], dict[str, Any]]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure short cases one after the other, again and again; yield the middle run of each.

    A machine that changes its speed changes it for all cases of a round, so what is compared is
    compared round by round: ``all_processor_seconds`` are in the order of the rounds.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in measures}
    for number in range(ROUNDS):
        for name, measure in measures.items():
            runs[name].append(measure())
        print(f"round {number + 1} of {ROUNDS}", flush=True)
    for name, found in runs.items():
        middle = dict(sorted(found, key=processor_seconds)[ROUNDS // 2])
        if "peak_MiB" in middle:
            middle["peak_MiB"] = statistics.median(run["peak_MiB"] for run in found)
        yield name, {**middle, "all_processor_seconds": [processor_seconds(run) for run in found]}


def processor_seconds(run: dict[str, Any]) -> float:
    """Processor seconds of a run, of all its stages together where it has some."""
    spent = run["processor_seconds"]
    return float(sum(spent.values()) if isinstance(spent, dict) else spent)


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megatron", type=Path, help="folder of Megatron-LM's source")
    parser.add_argument("--only", nargs="+", help="beginnings of cases' names")
    parser.add_argument("--again", action="store_true", help="what this code was measured with too")
    parser.add_argument("--prepare", action="store_true", help="measure nothing")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    texts = prepare(args.corpus, args.work)
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    missing = {
        name: measure
        for name, measure in cases(texts, args).items()
        if not args.prepare
        and (not args.only or name.startswith(tuple(args.only)))
        and (args.again or results.get(name, {}).get("source") != source_digest())
    }
    long = {name: missing.pop(name) for name in list(missing) if name.endswith("2 GB")}
    for name, result in itertools.chain(
        in_rounds(missing) if missing else (), ((name, run()) for name, run in long.items())
    ):
        results[name] = {**result, **provenance()}
        print(name, {k: round(v, 2) for k, v in result.items() if isinstance(v, float)}, flush=True)
        args.output.write_text(json.dumps(results, indent=2) + "\n")
    shutil.rmtree(args.work / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
