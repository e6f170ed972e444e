"""Generate the tables of README.md and docs/ from the committed results.

The text between two markers is generated:

    <!-- table: step cpu -->
    ...
    <!-- end of table -->

    python -m benchmarks.tables --write
    python -m benchmarks.tables --check

So are the pictures of ``FIGURES``. A table without a result file reads "Not measured yet."
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.learn.judge import curves
from benchmarks.lib.campaigns import read_lines
from benchmarks.lib.provenance import ROOT
from benchmarks.tables import (
    attention,
    data,
    faults,
    figures,
    gpu,
    judges,
    learn,
    onnx,
    published,
    step,
    text,
)
from benchmarks.tables.common import NOTHING, Result
from megatron_deberta.files import write_atomically

BLOCK = re.compile(
    r"(<!-- table: (?P<name>[\w-]+) (?P<device>\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL
)


def load(device: str, name: str) -> dict[str, Any] | None:
    """Return a committed result file, or None if it does not exist."""
    path = ROOT / "benchmarks" / "results" / device / f"{name}.json"
    record: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return record


def _of(write: Callable[..., str], name: str, *others: str) -> Callable[[str], str]:
    """Return the writer of a table of a result file; `others` may be missing."""

    def table_of(device: str) -> str:
        record, *more = (load(device, file) for file in (name, *others))
        return NOTHING if record is None else write(record, *more)

    return table_of


def _of_lines(write: Callable[..., str], *names: str) -> Callable[[str], str]:
    """Return the writer of a table of the results of campaigns."""

    def table_of(device: str) -> str:
        folder = ROOT / "benchmarks" / "results" / device
        lines = [read_lines(folder / f"{name}.jsonl") for name in names]
        return write(*lines) if any(lines) else NOTHING

    return table_of


TABLES: dict[str, Callable[[str], str]] = {
    "loader": _of(data.loader, "loader"),
    "data-index": _of(data.data_index, "data_index"),
    "masks": _of(data.masks, "masking"),
    "formats": _of(data.formats, "formats"),
    "shard-damage": _of(data.shard_damage, "shard_damage"),
    "step-summary": _of(step.summary, "step"),
    "step": _of(step.comparison, "step"),
    "encoder": _of(step.comparison, "encoder"),
    "peers": _of(step.comparison, "peers"),
    "disentanglement": _of(step.comparison, "disentanglement"),
    "profile": _of(step.profile, "profile"),
    "finetune-speed": _of(step.finetune, "finetune_speed"),
    "replaced-tokens-step": _of(step.replaced_tokens, "rtd_step"),
    "packed-rows": _of(step.packed_rows, "packed_rows"),
    "accelerate": _of(step.accelerate, "accelerate"),
    "published-models": _of(step.published_models, "accelerate", "onnx"),
    "judges": judges.found,
    "revisions": _of(step.revisions, "revisions"),
    "denormals": _of(step.denormals, "denormals"),
    "save-stalls": _of(step.save_stalls, "save_stalls"),
    "operators": _of(step.operators, "operators"),
    "synchronizations": _of(step.synchronizations, "synchronizations"),
    "predicted": _of(step.predicted, "predicted"),
    "step-kernels": _of(step.step_kernels, "step_kernels"),
    "first-contact": _of(gpu.first_contact_tables, "first_contact"),
    "large-step": _of(step.large_step, "large_step"),
    "which-recipe": _of(learn.which_recipe, "judge"),
    "same-batches": _of(learn.same_batches, "same_batches"),
    "learn": _of(learn.learn, "learn"),
    "attention-maps": _of(learn.attention_maps, "attention_maps"),
    "forms": _of(learn.forms, "forms"),
    "replaced-tokens": _of(
        learn.replaced_tokens, "learn_rtd", "learn_rtd_joint", "learn_rtd_no_convolution"
    ),
    "finetune-study": _of(learn.finetune_study, "finetune_study"),
    "imbalance": _of(learn.task_kinds("imbalance"), "task_kinds"),
    "ranking": _of(learn.task_kinds("ranking"), "task_kinds"),
    "embeddings": _of(learn.task_kinds("embeddings"), "task_kinds"),
    "quickstart-recipes": _of(learn.quickstart_recipes, "quickstart_recipes"),
    "prior-weights": _of(learn.prior_weights, "prior_weights"),
    "attention-summary": _of(attention.summary, "attention"),
    "attention": _of(attention.operator, "attention"),
    "kernels": _of(attention.kernels, "kernels"),
    "interpreted": _of(attention.interpreted, "interpreted"),
    "batched": _of(attention.batched, "batched_attention"),
    "published-uses": _of(published.uses, "published"),
    "published-speed": _of(published.speed, "published"),
    "published-decisions": _of(published.decisions, "published"),
    "onnx-speed": _of(onnx.speed, "onnx"),
    "onnx-accuracy": _of(onnx.accuracy, "onnx"),
    "onnx-fill-mask": _of(onnx.fill_mask, "onnx"),
    "preprocess": _of(text.preprocess, "preprocess"),
    "deduplicate": _of(text.deduplicate, "deduplicate", "deduplicate_long"),
    "deduplicate-quality": _of(text.deduplicate_quality, "deduplicate_quality"),
    "text-engines": _of(text.engines, "text_engines"),
    "text-commands": _of(text.commands, "text_commands"),
    "sketches": _of(text.sketches, "sketches"),
    "faults": _of_lines(faults.campaigns, "chaos", "mutants", "random_mutants", *faults.CAMPAIGNS),
    "fault-phases": _of_lines(faults.chaos_phases, "chaos"),
    "lost-nodes": _of_lines(faults.lost_nodes, "lost_nodes"),
    "hangs": _of_lines(faults.hangs, "hangs"),
    "frozen-disks": _of_lines(faults.frozen_disks, "frozen_disks"),
    "text-kills": _of_lines(faults.text_kills, "text_kills"),
    "hostile-files": _of_lines(faults.hostile_files, "hostile_files"),
    "mutants": _of_lines(faults.mutants, "mutants"),
    "random-mutants": _of_lines(faults.random_mutants, "random_mutants"),
    "slurm": _of_lines(faults.slurm, "slurm_campaign"),
}

FIGURES: dict[str, tuple[str, Callable[[Result], Any], Callable[[Any], bytes]]] = {
    "docs/images/step.png": ("step", figures.step_bars, figures.draw_step_bars),
    "docs/images/which-recipe.png": ("judge", curves, figures.draw_recipes),
}
"""Name of the CPU's results, what is shown of them, and how it is drawn, by picture."""


def rewrite(page: str) -> str:
    """Return a page with regenerated tables.

    Raises:
        KeyError: the page names a table that is not in `TABLES`.
    """
    return BLOCK.sub(
        lambda match: match[1] + TABLES[match["name"]](match["device"]) + match[4], page
    )


def stale_pages() -> dict[Path, str]:
    """Return the pages whose tables are out of date, with their new content."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    contents = {page: page.read_text(encoding="utf-8") for page in pages}
    return {page: new for page, old in contents.items() if (new := rewrite(old)) != old}


def stale_figures() -> dict[Path, bytes]:
    """Return the pictures that show other numbers than the results, as they should be."""
    stale = {}
    for name, (file, numbers_of, draw) in FIGURES.items():
        record = load("cpu", file)
        if record is None:
            continue
        numbers = numbers_of(record)
        if numbers != figures.shown_numbers(ROOT / name):
            stale[ROOT / name] = draw(numbers)
    return stale


def main() -> None:
    """Check or write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail if one is out of date")
    action.add_argument("--write", action="store_true", help="update all")
    args = parser.parse_args()
    pages = {page: content.encode() for page, content in stale_pages().items()}
    stale = pages | stale_figures()
    for path, content in stale.items():
        print(f"{path.relative_to(ROOT)}: {'written' if args.write else 'out of date'}")
        if args.write:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, content)
    if stale and args.check:
        raise SystemExit("run: python -m benchmarks.tables --write")
