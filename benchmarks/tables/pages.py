"""Generate the tables of README.md and docs/ from the committed results.

The text between two markers is generated:

    <!-- table: step cpu -->
    ...
    <!-- end of table -->

    python -m benchmarks.tables --write
    python -m benchmarks.tables --check

A table without a result file reads "Not measured yet."
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.attention.variants import Case
from benchmarks.learn.ablations import VARIANTS, mean_curves
from benchmarks.lib.campaigns import read_lines
from benchmarks.lib.provenance import ROOT
from benchmarks.tables import attention as attention_tables
from benchmarks.tables import faults
from benchmarks.tables import preprocess as preprocess_table
from benchmarks.tables import step as step_tables
from benchmarks.tables.common import NOTHING, UNMEASURED, Result, gib, markdown, place
from megatron_deberta.files import write_atomically

BLOCK = re.compile(
    r"(<!-- table: (?P<name>[\w-]+) (?P<device>\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL
)

PAPER = {
    "RoBERTa": ("84.9/85.1", "91.1/84.8", "79.5/76.0", "66.8"),
    "DeBERTa": ("86.3/86.2", "92.1/86.1", "82.5/79.3", "71.7"),
    "-EMD": ("86.1/86.1", "91.8/85.8", "81.3/78.0", "70.3"),
    "-C2P": ("85.9/85.7", "91.6/85.8", "81.3/78.3", "69.3"),
    "-P2C": ("86.0/85.8", "91.7/85.7", "80.8/77.6", "69.6"),
    "+shared projections": ("86.3/86.3", "92.2/86.2", "82.3/79.5", ""),
    "+convolution": ("86.3/86.5", "92.5/86.4", "82.5/79.7", ""),
}
"""MNLI-m/mm, SQuAD 1.1, SQuAD 2.0, RACE of He et al. 2021, Tables 4 and 13."""


def load(device: str, name: str) -> dict[str, Any] | None:
    """Return a committed result file, or None if it does not exist."""
    path = ROOT / "benchmarks" / "results" / device / f"{name}.json"
    record: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return record


def same_batches(device: str) -> str:
    """Validation loss beside that of transformers' DeBERTa on the same batches."""
    header = ("step", "tokens", "ours", "transformers")
    record = load(device, "same_batches")
    if record is None:
        return NOTHING
    theirs = {point["step"]: point["loss"] for point in record["huggingface"]}
    ours = {point["step"]: point for point in record["ours"]}
    rows = [
        (str(step), f"{point['tokens'] / 1e6:.2f}M", f"{point['loss']:.3f}",
         f"{theirs[step]:.3f}" if step in theirs else "")
        for step, point in ours.items()
    ]  # fmt: skip
    unigram = f"\nUnigram cross-entropy of the same targets: {record['unigram_loss']:.3f} nat.\n"
    return markdown(header, rows) + unigram


def learn(device: str) -> str:
    """Final validation loss of the ablations beside the paper's fine-tuning results."""
    header = ("model", "seeds", "validation loss", "difference", "s per step",
              "paper: MNLI-m/mm", "SQuAD 1.1 F1/EM", "SQuAD 2.0 F1/EM", "RACE")  # fmt: skip
    record = load(device, "learn")
    if record is None:
        return NOTHING
    last = {name: points[-1] for name, points in mean_curves(record)}
    steps, reference = record["steps"], last.get("DeBERTa", (0, 0.0))
    rows = []
    for name in VARIANTS:
        seeds = sum(
            run["variant"] == name and run["validation"][-1]["step"] == steps
            for run in record["runs"]
        )
        loss = against = ""
        if name in last:
            step, mean = last[name]
            loss = f"{mean:.3f}" if step == steps else f"{mean:.3f} at step {step}"
            if step == steps == reference[0]:
                against = f"{mean - reference[1]:+.3f}"
        seconds = record["seconds_per_step"].get(name)
        rows.append((
            name, str(seeds), loss or UNMEASURED, against,
            f"{seconds:.3g}" if seconds else UNMEASURED, *PAPER.get(name, ("", "", "", "")),
        ))  # fmt: skip
    tokens = record["steps"] * record["tokens_per_step"] / 1e6
    timed = f"; steps timed at load {record['timed']['load']}" if "timed" in record else ""
    return markdown(header, rows) + (
        f"\n({record['layers']} layers x {record['width']}, {tokens:.2f} million tokens; "
        f"unigram cross-entropy of the same targets {record['unigram_loss']:.3f} nat; "
        f"{record['hardware']}, torch {record['torch']}{timed}.)\n"
    )


def attention(device: str) -> str:
    """Time, memory and error of the attention operator's backends and peers."""
    header = ("case", "variant", "forward, ms", "forward + backward, ms", "speed / flash",
              "peak memory, MiB", "error")  # fmt: skip
    record = load(device, "attention")
    if record is None:
        return NOTHING
    cells = []
    for row in record.get("cases") or record["items"].values():
        case = Case(**row["case"]).name
        for name, found in row["variants"].items():
            times = found.get("milliseconds")
            if times is None:
                cells.append((case, name, found["not run"], "", "", "", ""))
            else:
                floor, peak = found.get("fraction_of_floor"), found.get("peak_mib")
                both, forward = (
                    f"{times[key]:,.0f}" if times[key] >= 100 else f"{times[key]:.3g}"
                    for key in ("both", "forward")
                )
                cells.append((
                    case, name, forward, both,
                    f"{floor:.2f}" if floor else "", f"{peak:,.0f}" if peak is not None else "",
                    f"{max(found['errors'].values()):.0e}" if "errors" in found else "",
                ))  # fmt: skip
            case = ""
    return markdown(header, cells) + (
        f"\n({record['hardware']}, {record['cores']} cores, load {record['load']:.1f}, "
        f"torch {record['torch']}.)\n"
    )


def deduplicate(device: str) -> str:
    """Time, disk and memory of deduplication."""
    record = load(device, "deduplicate")
    if record is None:
        return NOTHING
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
    long = load(device, "deduplicate_long")
    if long is not None:
        size = (
            f"peak memory with two documents of {long['document_bytes'] / 1e6:.0f} MB, one worker"
        )
        rows.append((size, f"{gib(long['peak_memory_bytes'])} GiB"))
    place = f"\n({record['hardware']}, {record['cores']} cores, load {record['load']}.)\n"
    return markdown(("", f"{gigabytes:.0f} GB"), rows) + place


def deduplicate_quality(device: str) -> str:
    """Planted duplicates that deduplication detected."""
    record = load(device, "deduplicate_quality")
    if record is None:
        return NOTHING
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


def sketches(device: str) -> str:
    """Speed and error of the MinHash libraries."""
    record = load(device, "sketches")
    if record is None:
        return NOTHING
    rows = [
        (name, f"{side['hashes_per_second'] / 1e6:.2f}", f"{side['error']:.4f}")
        for name, side in record["libraries"].items()
    ]
    return markdown(("library", "million n-grams/s, one core", "error of the estimate"), rows)


def loader(device: str) -> str:
    """Speed of packing, masking and collation by format."""
    record = load(device, "loader")
    if record is None:
        return NOTHING
    columns = [(masking, micro) for masking in ("uniform", "released") for micro in (8, 64)]
    cells: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for row in record["results"]:
        key = (row["corpus"], f"`{row['packing']}`, N = {row['sequence_length']}")
        real = row["tokens_per_second"] / 1e6
        speed = f"{real:.1f}, {real / row['row_filled']:.1f}"
        cells.setdefault(key, {})[row["masking"], row["micro_batch"]] = speed
    titles = [f"{masking}, {micro} rows" for masking, micro in columns]
    rows = [
        (*key, *(found.get(column, UNMEASURED) for column in columns))
        for key, found in cells.items()
    ]
    one = record["h200_tokens_per_second"] / 1e6
    return markdown(("text", "format", *titles), rows) + (
        f"\nMillion tokens/s per core: without and with padding. "
        f"20 times an H200: {20 * one:.2f}; 50 times: {50 * one:.2f}.\n"
        + place(record["provenance"])
    )


def data_index(device: str) -> str:
    """Time and memory of building the index of each format."""
    record = load(device, "data_index")
    if record is None:
        return NOTHING
    rows = [
        (
            f"{row['documents']:,}",
            f"`{row['packing']}`",
            f"{row['build']['cpu_seconds']:.1f} s",
            f"{row['build']['own_memory_mib']:.0f} MiB",
            f"{row['index_bytes_a_document']:.0f} B",
            f"{row['open']['cpu_seconds']:.2f} s",
            f"{row['open']['own_memory_mib']:.0f} MiB",
        )
        for row in record["results"]
    ]
    titles = (
        "documents",
        "format",
        "build, CPU time",
        "build memory",
        "disk per document",
        "open, CPU time",
    )
    return markdown((*titles, "open memory"), rows) + place(record["provenance"])


def masks(device: str) -> str:
    """Masking rates beside those of the released algorithm."""
    record = load(device, "masking")
    if record is None:
        return NOTHING
    names = {
        "rate_by_eighth": [f"rate in eighth {number}" for number in range(1, 9)],
        "rate_of_last_16": ["rate of the last 16"],
        "runs_of_1_2_3_more_words": [f"runs of {n} words" for n in ("1", "2", "3", "more")],
        "masked_kept_random": ["[MASK]", "kept", "random"],
    }
    rows = [
        (title, f"{ours:.2%}", f"{theirs:.2%}", f"{100 * (ours - theirs):+.2f}")
        for name, titles in names.items()
        for title, ours, theirs in zip(
            titles, record["ours"][name], record["release"][name], strict=True
        )
    ]
    return markdown(("", "ours", "release", "points"), rows) + (
        f"\n({record['rows']:,} rows of 512 tokens.)\n"
    )


def formats(device: str) -> str:
    """Short runs of each format, killed and resumed."""
    record = load(device, "formats")
    if record is None:
        return NOTHING
    rows = [
        (
            f"`{row['packing']}`",
            f"{row['loss_first_5']:.3f} to {row['loss_last_5']:.3f}",
            f"{row['validation'][0]['loss']:.3f} to {row['validation'][1]['loss']:.3f}",
            f"{row['validation'][1]['next_sentence_loss']:.3f}, "
            f"{row['validation'][1]['next_sentence_accuracy']:.0%}"
            if "next_sentence_loss" in row["validation"][1]
            else "",
            f"{row['killed_after_step']}, from {row['resumed_from_step']}",
            "bit-identical" if row["same_bits"] else "DIFFERENT",
        )
        for row in record["results"]
    ]
    titles = ("format", "loss, first to last 5 steps", "validation, step 25 to 60")
    return markdown(
        (*titles, "next sentence: loss, accuracy", "killed after step", "resumed run"), rows
    )


def shard_damage(device: str) -> str:
    """Where damaged shards were detected."""
    record = load(device, "shard_damage")
    if record is None:
        return NOTHING
    rows = [
        (f"`.{kind}`", str(sum(found.values())), *(str(count) for count in found.values()))
        for kind, found in record["noticed_by"].items()
    ]
    return markdown(("file", "mutations", "at opening", "by `verify`", "undetected"), rows)


def _of_lines(name: str, write: Callable[[list[Result]], str]) -> Callable[[str], str]:
    """Return the writer of a table of a campaign's result lines."""

    def table_of(device: str) -> str:
        lines = read_lines(ROOT / "benchmarks" / "results" / device / f"{name}.jsonl")
        return write(lines) if lines else NOTHING

    return table_of


def _of(name: str, write: Callable[[Result], str]) -> Callable[[str], str]:
    """Return the writer of a table of one result file."""

    def table_of(device: str) -> str:
        record = load(device, name)
        return NOTHING if record is None else write(record)

    return table_of


TABLES: dict[str, Callable[[str], str]] = {
    "loader": loader,
    "data-index": data_index,
    "masks": masks,
    "formats": formats,
    "step-summary": _of("step", step_tables.summary),
    "step": _of("step", step_tables.comparison),
    "peers": _of("peers", step_tables.comparison),
    "disentanglement": _of("disentanglement", step_tables.comparison),
    "profile": _of("profile", step_tables.profile),
    "large-step": _of("large_step", step_tables.large_step),
    "same-batches": same_batches,
    "learn": learn,
    "attention": attention,
    "kernels": _of("kernels", attention_tables.kernels),
    "interpreted": _of("interpreted", attention_tables.interpreted),
    "deduplicate": deduplicate,
    "deduplicate-quality": deduplicate_quality,
    "preprocess": lambda device: preprocess_table.tables(load(device, "preprocess"), markdown),
    "sketches": sketches,
    "shard-damage": shard_damage,
    "faults": _of_lines("chaos", faults.chaos),
    "hangs": _of_lines("hangs", faults.hangs),
    "slurm": _of_lines("slurm_campaign", faults.slurm),
}


def rewrite(text: str) -> str:
    """Return a page with regenerated tables.

    Raises:
        KeyError: the page names a table that is not in `TABLES`.
    """
    return BLOCK.sub(
        lambda match: match[1] + TABLES[match["name"]](match["device"]) + match[4], text
    )


def stale_pages() -> dict[Path, str]:
    """Return the pages whose tables are out of date, with their new text."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    fresh = {page: rewrite(page.read_text(encoding="utf-8")) for page in pages}
    return {page: text for page, text in fresh.items() if text != page.read_text(encoding="utf-8")}


def main() -> None:
    """Check or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail if a table is out of date")
    what.add_argument("--write", action="store_true", help="update all tables")
    args = parser.parse_args()
    stale = stale_pages()
    for page, text in stale.items():
        print(f"{page.relative_to(ROOT)}: {'written' if args.write else 'out of date'}")
        if args.write:
            write_atomically(page, text.encode())
    if stale and args.check:
        raise SystemExit("run: python -m benchmarks.tables --write")


if __name__ == "__main__":
    main()
