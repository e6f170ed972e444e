"""Tables of preprocessing and deduplication."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.tables.common import Result, gib, markdown

_TITLES = {
    "sentencepiece in memory": "SentencePiece alone, documents in memory",
    "our tokenizer in memory": "our tokenizer alone, documents in memory",
    "ours, unigram, plain": "ours, unigram, JSONL",
    "ours, unigram, gzip": "same, gzip",
    "ours, unigram, zstd": "same, zstandard",
    "ours, unigram, start-up": "same, first documents only (start-up)",
    "Megatron-LM, unigram, plain": "Megatron-LM's script, unigram, JSONL",
    "Megatron-LM, unigram, start-up": "same, first documents only (start-up)",
    "gigatoken in memory": "gigatoken alone, documents in memory",
    "ours, gpt2, plain": "ours, byte-level BPE, JSONL",
    "ours, gpt2, gzip": "same, gzip",
    "ours, gpt2, zstd": "same, zstandard",
    "ours, gpt2, start-up": "same, first documents only (start-up)",
    "ours, unigram, 20 MB": "ours, unigram, 20 MB",
    "ours, unigram, 2 GB": "ours, unigram, 2 GB (novels, repeated)",
    "sentencepiece in memory, 2 GB": "SentencePiece alone, same, in memory",
    "Megatron-LM, unigram, 2 GB": "Megatron-LM's script, unigram, same",
    "ours, gpt2, 2 GB": "ours, byte-level BPE, same",
    "ours, gpt2, new words, 2 GB": "ours, byte-level BPE, 2 GB without repeated words",
    "gigatoken in memory, 2 GB": "gigatoken alone, same, in memory",
}


def preprocess(record: Result) -> str:
    """Time and memory of preprocessing, speed ratios and CPU time by stage."""
    header = ("", "s", "CPU s", "MB/s", "MB per CPU s", "peak MiB", "load")
    some = next(iter(record.values()))
    return "\n".join(
        (
            markdown(header, speed_rows(record)),
            markdown(("ratio (of speeds, by CPU time unless stated)", ""), ratios(record)),
            markdown(*stage_rows(record)),
            f"({some['hardware']}, {some['cores']} cores.)\n",
        )
    )


def speed_rows(record: Result) -> list[tuple[str, ...]]:
    """Return time, CPU time, speed and memory of each measured case."""
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


def ratios(record: Result) -> list[tuple[str, str]]:
    """Return speed ratios between the commands and libraries."""
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
                found.append((f"{title}, without start-up", f"{ratio:.2f}"))
    if (case := record.get("stages, gpt2, one process")) is not None:
        stages = _stages(case)
        share = stages["encode"] / sum(stages.values())
        found.append(("gigatoken's share of CPU time, all stages in one process", f"{share:.2f}"))
    for size, suffix in (("plain", ""), ("2 GB", ", 2 GB")):
        ours, peer = f"ours, unigram, {size}", f"Megatron-LM, unigram, {size}"
        if {ours, peer} <= record.keys():
            for unit, title in (("seconds", "wall time"), ("processor_seconds", "CPU time")):
                share = record[peer][unit] / record[ours][unit]
                name = f"whole command / Megatron-LM's script{suffix}, {title}"
                found.append((name, f"{share:.2f}"))
    small, large = "ours, unigram, 20 MB", "ours, unigram, 2 GB"
    if {small, large} <= record.keys():
        share = record[large]["peak_MiB"] / record[small]["peak_MiB"]
        found.append(("peak memory at 2 GB / at 20 MB", f"{share:.2f}"))
    return found


def stage_rows(record: Result) -> tuple[list[str], list[list[str]]]:
    """Return CPU milliseconds per megabyte of each stage, one row per vocabulary."""
    header, rows = ["one process, CPU ms per MB"], []
    for kind in ("unigram", "gpt2"):
        case = record.get(f"stages, {kind}, one process")
        if case is None:
            continue
        stages = _stages(case)
        header = [*header[:1], *stages, "total"]
        spent = [*stages.values(), sum(stages.values())]
        rows.append([kind, *(f"{1e3 * each / case['megabytes']:.2f}" for each in spent)])
    return header, rows


def _ratio(record: Result, ours: str, peer: str, start: str = "") -> float:
    """Return our speed divided by a peer's, without the time of a case ``start``.

    For cases measured in rounds: the median of the rounds' ratios.
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


def deduplicate(record: Result, long: Result | None) -> str:
    """Time, disk and memory of deduplication."""
    documents = record["summary"]["documents"]
    gigabytes = record["input_bytes"] / 1e9
    removed = record["summary"]["removed"]
    rows = [
        ("input", f"{gigabytes:.2f} GB, {documents:,} documents"),
        ("removed", f"{removed['exact']:,} exact, {removed['near']:,} near"),
        ("time", f"{record['seconds']:.0f} s with {record['workers']} workers"),
        ("processor time", f"{record['processor_seconds']:.0f} s, "
         f"{record['input_bytes'] / record['processor_seconds'] / 1e6:.1f} MB/s per core"),
        ("peak memory, all processes", f"{gib(record['peak_memory_bytes'])} GiB"),
        ("peak disk, work and result", f"{record['peak_disk_bytes'] / 1e9:.2f} GB, of which "
         f"{record['output_bytes'] / 1e9:.2f} GB result"),
    ]  # fmt: skip
    if long is not None:
        size = (
            f"peak memory with two documents of {long['document_bytes'] / 1e6:.0f} MB, one worker"
        )
        rows.append((size, f"{gib(long['peak_memory_bytes'])} GiB"))
    place = f"\n({record['hardware']}, {record['cores']} cores, load {record['load']}.)\n"
    return markdown(("", f"{gigabytes:.0f} GB"), rows) + place


def deduplicate_quality(record: Result) -> str:
    """Planted duplicates that deduplication detected."""
    rows = [
        (kind, str(count["pairs"]), f"{count['found_at_0.7']} of {count['pairs_at_0.7']}",
         str(count["found"] - count["found_at_0.7"]))
        for kind, count in record["kinds"].items()
    ]  # fmt: skip
    wrong = len(record["removed_without_duplicate"])
    return (
        markdown(("kind", "pairs", "found, Jaccard at least 0.7", "found, Jaccard below 0.7"), rows)
        + f"\n({record['removed']} documents removed, {wrong} without a planted duplicate.)\n"
    )


def sketches(record: Result) -> str:
    """Speed and error of the MinHash libraries."""
    rows = [
        (name, f"{side['hashes_per_second'] / 1e6:.2f}", f"{side['error']:.4f}")
        for name, side in record["libraries"].items()
    ]
    return markdown(("library", "million n-grams/s, one core", "error of the estimate"), rows)


def commands(record: Result) -> str:
    """Return the table of time and memory of ``split``, ``merge`` and ``train-tokenizer``."""
    rows = [
        (f"`{case.split()[0]}`{case.removeprefix(case.split()[0])}", f"{found['seconds']:.1f} s",
         f"{found['processor_seconds']:.1f} s", f"{found['peak_MiB']:.0f} MiB")
        for case, found in record["cases"].items()
    ]  # fmt: skip
    place = (
        f"\n(`split` of {record['text_bytes'] / 1e9:.2f} GB, samples of real text, shards of "
        f"{record['shard_bytes'] / 1e9:.2f} GB; one worker, start-up included; "
        f"{record['hardware']}, {record['cores']} cores, load {record['load']}.)\n"
    )
    return markdown(("command", "time", "processor time", "peak memory"), rows) + place


def engines(record: Result) -> str:
    """Time of both commands on each engine."""
    rows = []
    for case, found in record["cases"].items():
        command, engine = case.split()
        local = record["cases"][f"{command} local"]
        rows.append((
            command, engine, f"{found['seconds']:.0f} s", f"{found['processor_seconds']:.0f} s",
            f"{found['processor_seconds'] / local['processor_seconds']:.2f}",
            "yes" if found["sha256"] == local["sha256"] else "no",
        ))  # fmt: skip
    header = ("command", "engine", "time", "processor time", "of local's", "same bytes")
    place = (
        f"\n({record['input_bytes'] / 1e9:.2f} GB, {record['workers']} workers on "
        f"{record['cores']} cores, {record['hardware']}, load {record['load']}.)\n"
    )
    return markdown(header, rows) + place
