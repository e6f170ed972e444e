"""The tables of preprocessing speed in the documentation, from the committed results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

Record = Mapping[str, Any]

_TITLES = {
    "sentencepiece in memory": "SentencePiece alone, documents in memory",
    "our tokenizer in memory": "our tokenizer alone, documents in memory",
    "ours, unigram, plain": "ours, unigram, JSONL",
    "ours, unigram, gzip": "the same, gzip",
    "ours, unigram, zstd": "the same, zstandard",
    "ours, unigram, start-up": "the same, first documents: start-up",
    "Megatron-LM, unigram, plain": "Megatron-LM's script, unigram, JSONL",
    "Megatron-LM, unigram, start-up": "the same, first documents: start-up",
    "gigatoken in memory": "gigatoken alone, documents in memory",
    "ours, gpt2, plain": "ours, byte-level BPE, JSONL",
    "ours, gpt2, gzip": "the same, gzip",
    "ours, gpt2, zstd": "the same, zstandard",
    "ours, gpt2, start-up": "the same, first documents: start-up",
    "ours, unigram, 20 MB": "ours, unigram, 20 MB",
    "ours, unigram, 2 GB": "ours, unigram, 2 GB (the novels over and over)",
    "sentencepiece in memory, 2 GB": "SentencePiece alone, the same in memory",
    "Megatron-LM, unigram, 2 GB": "Megatron-LM's script, unigram, the same",
    "ours, gpt2, 2 GB": "ours, byte-level BPE, the same",
    "ours, gpt2, new words, 2 GB": "ours, byte-level BPE, 2 GB of words that never come again",
    "gigatoken in memory, 2 GB": "gigatoken alone, the same in memory",
}


def tables(record: Record | None, markdown: Callable[..., str]) -> str:
    """Return all tables, laid out by the given function; nothing without a result."""
    if record is None:
        return "Unmeasured.\n"
    header = ("", "s", "processor s", "MB/s", "MB a processor s", "peak MiB", "load")
    some = next(iter(record.values()))
    return "\n".join(
        (
            markdown(header, speed_rows(record)),
            markdown(("ratio of processor time", ""), ratios(record)),
            markdown(*stage_rows(record)),
            f"({some['hardware']}, {some['cores']} cores.)\n",
        )
    )


def speed_rows(record: Record) -> list[tuple[str, ...]]:
    """Return seconds, processor seconds, speeds and memory of each case that was measured."""
    rows = []
    for name, title in _TITLES.items():
        if name not in record:
            continue
        case = record[name]
        is_start = name.endswith("start-up")
        rate = "" if is_start else f"{case['MB_per_processor_second']:.1f}"
        wall = "" if is_start else f"{case['MB_per_second']:.1f}"
        peak = f"{case['peak_MiB']:.0f}" if "peak_MiB" in case else ""
        spent = f"{case['processor_seconds']:.2f}"
        rows.append((title, f"{case['seconds']:.1f}", spent, wall, rate, peak, f"{case['load']}"))
    return rows


def ratios(record: Record) -> list[tuple[str, str]]:
    """Return what the aims are about, processor second against processor second."""
    found = []
    for title, ours, peer, start in (
        ("our tokenizer / SentencePiece", "our tokenizer in memory", "sentencepiece in memory", ""),
        ("whole command / SentencePiece", "ours, unigram, plain", "sentencepiece in memory",
         "ours, unigram, start-up"),
        ("whole command / gigatoken", "ours, gpt2, plain", "gigatoken in memory",
         "ours, gpt2, start-up"),
        ("whole command / SentencePiece, 2 GB", "ours, unigram, 2 GB",
         "sentencepiece in memory, 2 GB", ""),
        ("whole command / gigatoken, 2 GB", "ours, gpt2, 2 GB", "gigatoken in memory, 2 GB", ""),
    ):  # fmt: skip
        if {ours, peer} <= record.keys():
            found.append((title, f"{_ratio(record, ours, peer):.2f}"))
            if start in record:
                ratio = _ratio(record, ours, peer, start)
                found.append((f"{title}, start-up taken off", f"{ratio:.2f}"))
    if (case := record.get("stages, gpt2, one process")) is not None:
        stages = _stages(case)
        share = stages["encode"] / sum(stages.values())
        found.append(("all stages in one process / its gigatoken", f"{share:.2f}"))
    for size, suffix in (("plain", ""), ("2 GB", ", 2 GB")):
        ours, peer = f"ours, unigram, {size}", f"Megatron-LM, unigram, {size}"
        if {ours, peer} <= record.keys():
            for unit in ("seconds", "processor_seconds"):
                share = record[peer][unit] / record[ours][unit]
                name = f"whole command / Megatron-LM's script{suffix}, {unit}"
                found.append((name, f"{share:.2f}"))
    small, large = "ours, unigram, 20 MB", "ours, unigram, 2 GB"
    if {small, large} <= record.keys():
        share = record[large]["peak_MiB"] / record[small]["peak_MiB"]
        found.append(("peak memory at 2 GB / at 20 MB", f"{share:.2f}"))
    return found


def stage_rows(record: Record) -> tuple[list[str], list[list[str]]]:
    """Return milliseconds a megabyte of each stage, one row a vocabulary."""
    header, rows = ["one process, ms a MB"], []
    for kind in ("unigram", "gpt2"):
        case = record.get(f"stages, {kind}, one process")
        if case is None:
            continue
        stages = _stages(case)
        header = [*header[:1], *stages, "together"]
        spent = [*stages.values(), sum(stages.values())]
        rows.append([kind, *(f"{1e3 * each / case['megabytes']:.2f}" for each in spent)])
    return header, rows


def _ratio(record: Record, ours: str, peer: str, start: str = "") -> float:
    """Speed of ours by that of a peer, with a case ``start`` taken off.

    Of cases measured in rounds: the middle one of the rounds' ratios.
    """

    def seconds(name: str) -> list[float]:
        case = record[name]
        return list(case.get("all_processor_seconds", [case["processor_seconds"]]))

    starts = seconds(start) if start else [0.0] * len(seconds(ours))
    started = record[start]["megabytes"] if start else 0.0
    size = (record[ours]["megabytes"] - started) / record[peer]["megabytes"]
    rounds = zip(seconds(ours), seconds(peer), starts, strict=True)
    return median(size * base / (spent - begin) for spent, base, begin in rounds)


def _stages(case: Mapping[str, Any]) -> dict[str, float]:
    spent: Mapping[str, float] = case["processor_seconds"]
    return {name: seconds for name, seconds in spent.items() if name != "load tokenizer"}
