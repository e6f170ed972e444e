"""Tables of the data loader, its indices and masks, and of shards."""

from __future__ import annotations

from benchmarks.tables.common import UNMEASURED, Result, markdown, place


def loader(record: Result) -> str:
    """Speed of packing, masking and collation by format."""
    columns = [(masking, micro) for masking in ("uniform", "microsoft") for micro in (8, 64)]
    cells: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for row in record["results"]:
        key = (row["corpus"], f"`{row['packing']}`, N = {row['sequence_length']}")
        real = row["tokens_per_second"] / 1e6
        speed = f"{real:.1f}, {real / row['row_filled']:.1f}"
        # Earlier results have the old name.
        masking = {"released": "microsoft"}.get(row["masking"], row["masking"])
        cells.setdefault(key, {})[masking, row["micro_batch"]] = speed
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


def data_index(record: Result) -> str:
    """Time and memory of building the index of each format."""
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


def masks(record: Result) -> str:
    """Masking rates beside those of the released algorithm."""
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


def formats(record: Result) -> str:
    """Short runs of each format, killed and resumed."""
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


def shard_damage(record: Result) -> str:
    """Where damaged shards were detected."""
    rows = [
        (f"`.{kind}`", str(sum(found.values())), *(str(count) for count in found.values()))
        for kind, found in record["noticed_by"].items()
    ]
    return markdown(("file", "mutations", "at opening", "by `verify`", "undetected"), rows)
