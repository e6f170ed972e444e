"""The tables of whole steps: against other models, by part, and the 1.5B model's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.pages import UNMEASURED, Result, gib, markdown, place
from benchmarks.steps.parts import part_rows

TITLES = {
    "ours": "DeBERTa, ours",
    "huggingface": "transformers",
    "disentangled_flash": "transformers with DisentangledFlash",
    "modernbert": "ModernBERT-base",
    "roberta": "RoBERTa-base",
    "bert": "BERT-base",
    "plain_attention": "ours with plain flash attention",
}
PARTS = ("attention", "ffn", "head", "optimizer")


def summary(record: Result) -> str:
    """Speed-up and memory against transformers, for README."""
    header = ("one pretraining step against `transformers`", "speed-up",
              "peak memory, GiB: ours / theirs")  # fmt: skip
    rows = record["results"]
    return markdown(
        header,
        [
            (_case(row), f"{row['speedup']['huggingface']:.1f}x",
             f"{gib(row['sides']['ours']['peak_bytes'])} / "
             f"{gib(row['sides']['huggingface']['peak_bytes'])}")
            for row in rows
        ],
    ) + _caption(record, rows)  # fmt: skip


def comparison(record: Result) -> str:
    """Each case's sides, ours first, and what could not be tried."""
    header = ("case", "model", "parameters, M", "GFLOP a token", "s a step", "tokens/s", "MFU",
              "our speed / theirs", "aimed at", "peak memory, GiB",
              "attention / FFN / head / optimizer, %")  # fmt: skip
    cells = []
    for row in record["results"]:
        first_other = next((name for name in row["sides"] if name != "ours"), "")
        for name, side in row["sides"].items():
            ratio = row["speedup"].get(name)
            aimed = f"{row['target']:.3g}" if row["target"] and name == first_other else ""
            cells.append((
                _case(row) if name == "ours" else "", TITLES[name],
                _number(side, "parameters", "{:.0f}", 1e6),
                _number(side, "gflop_per_token", "{:.2f}"),
                f"{side['seconds']:.3g}", f"{side['tokens_per_second']:,.0f}",
                _number(side, "mfu", "{:.0%}"), f"{ratio:.2f}" if ratio else "", aimed,
                gib(side["peak_bytes"]), _shares(side.get("seconds_by_part", {})),
            ))  # fmt: skip
    notes = "".join(f"\nMissing here: {note}.\n" for note in sorted(_missing(record)))
    return markdown(header, cells) + _caption(record, record["results"]) + notes


def _missing(record: Result) -> set[str]:
    """Sides and settings that could not be tried, each with the reason."""
    found = set()
    for row in record["results"]:
        for name, reason in row.get("missing", {}).items():
            found.add(f"{TITLES[name]}: {reason}")
        for name, tried in row.get("attention_tried", {}).items():
            for variant, reason in tried.items():
                if isinstance(reason, str):
                    found.add(f"{TITLES[name]}, {variant}: {reason}")
    return found


def profile(record: Result) -> str:
    """Where a step's time goes, by part."""
    table = markdown(("part", "s a step", "share", "of it"), part_rows(dict(record)))
    return f"{table}\n{record['name']}.\n{place(record['provenance'])}"


def large_step(record: Result) -> str:
    """The 1.5B model's real step through DeepSpeed, from the GPU suite's part ``step``."""
    header = ("step", "tokens/s", "ms", "MFU", "rows a micro batch",
              "peak memory, GiB: measured / by formula")  # fmt: skip
    rows = [
        (name, f"{item['tokens_per_second']:,.0f}", f"{1e3 * item['seconds_per_step']:,.0f}",
         f"{item['mfu']:.1%}", str(item["micro_batch_size"]),
         f"{item['peak_gib']:.1f} / {item['predicted_gib']:.1f}")
        for name, item in record["items"].items()
        if "tokens_per_second" in item
    ]  # fmt: skip
    return markdown(header, rows) + place(record)


def _number(side: dict[str, Any], key: str, form: str, unit: float = 1.0) -> str:
    return form.format(side[key] / unit) if key in side else UNMEASURED


def _shares(seconds: dict[str, float]) -> str:
    """Percent of the whole by part; unmeasured where nothing could be told apart."""
    if not seconds:
        return UNMEASURED
    whole = sum(seconds.values())
    return " / ".join(f"{100 * seconds[name] / whole:.0f}" for name in PARTS)


def _caption(record: Result, rows: Iterable[dict[str, Any]]) -> str:
    """Where rows were measured."""
    places = {f"{row['hardware']}, {row['cores']} cores, torch {row['torch']}" for row in rows}
    threads = f", {record['threads']} threads" if "+cpu" in "".join(places) else ""
    return f"\n({'; '.join(sorted(places))}{threads}; {record['tokens']:,} tokens a step.)\n"


def _case(row: dict[str, Any]) -> str:
    """A case with its length."""
    length = f"N={row['length']}"
    name: str = row["name"]
    return name if length in name else f"{name}, {length}"
