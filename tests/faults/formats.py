"""A short run of each packing format, killed and resumed; the result must be bit-identical.

``python -m tests.faults.formats --output FILE`` does all four on text of this machine; the test
suite does one.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.provenance import provenance
from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.cli.main import main as command
from megatron_deberta.data.sample_log import check_sample_log, read_sample_log
from tests.support.jobs import RUN, assert_same_checkpoints, losses, records, run_to_end, start

FORMATS = ("full_sentences", "doc_sentences", "segment_pair", "sentence_pair")
STEPS, SHORT_STEPS, BATCH = 60, 15, 8


def prepare_sentences(folder: Path) -> Path:
    """Make a tokenizer, a shard of sentences and ``run.yaml`` of Python's documentation topics."""
    text = folder / "docs.jsonl"
    with text.open("w") as stream:
        for topic in pydoc_data.topics.topics.values():
            stream.write(json.dumps({"text": topic}) + "\n")
    tokenizer, prefix = str(folder / "tokenizer"), str(folder / "docs")
    made = ["train-tokenizer", "--input", str(text), "--vocab-size", "500", "--output", tokenizer]
    assert command(made) == 0
    shards = ["preprocess", "--input", str(text), "--tokenizer", tokenizer, "--output", prefix]
    assert command([*shards, "--workers", "0", "--sentences"]) == 0
    run = folder / "run.yaml"
    run.write_text(RUN.format(folder=folder).replace("_text_document", "_text_sentence"))
    return run


def run_format(run: Path, folder: Path, packing: str, kill_at: int) -> dict[str, Any]:
    """Train once to the end and once killed at a step; they must be the same.

    Args:
        run: from ``prepare_sentences``.
        folder: of the two runs.
        packing: the format.
        kill_at: step after which the second run is killed with SIGKILL.

    Returns:
        What was seen.
    """
    overrides = [f"data.packing={packing}", f"data.short_steps={SHORT_STEPS}"]
    overrides += ["data.short_sequence_length=32", "checkpoint.save_every=6"]
    # Pairs under DeepSpeed are the layout matrix's; without it a start takes half the time.
    overrides += ["precision.engine=plain", "precision.zero_stage=0"]
    if packing.endswith("pair"):
        overrides += ["model.type_vocab_size=2", "model.next_sentence_head=true"]
    whole, killed = folder / f"{packing}-whole", folder / f"{packing}-killed"
    begin = time.monotonic()
    run_to_end(run, whole, 1, *overrides)
    seconds = time.monotonic() - begin
    job = start(run, killed, 1, *overrides)
    job.wait_for_step(kill_at)
    job.ranks[0].kill()
    assert job.wait() == [-signal.SIGKILL]
    left_at = committed_steps(killed)
    run_to_end(run, killed, 1, *overrides)
    assert losses(killed) == losses(whole)
    assert records(killed, "validation") == records(whole, "validation")
    assert read_sample_log(killed / "ledger") == read_sample_log(whole / "ledger")
    check_sample_log(whole / "ledger", BATCH, STEPS)
    assert_same_checkpoints(killed, whole, STEPS)
    curve, validation = losses(whole), records(whole, "validation")
    seen = {
        "packing": packing,
        "loss_first_5": sum(curve[:5]) / 5,
        "loss_last_5": sum(curve[-5:]) / 5,
        "validation": [validation[25], validation[STEPS]],
        "killed_after_step": kill_at,
        "resumed_from_step": left_at[-1] if left_at else 0,
        "same_bits": True,
        "seconds": round(seconds, 1),
    }
    if packing.endswith("pair"):
        pairs = [record["next_sentence_loss"] for record in records(whole).values()]
        seen["next_sentence_loss_first_5"] = sum(pairs[:5]) / 5
        seen["next_sentence_loss_last_5"] = sum(pairs[-5:]) / 5
    return seen


def main() -> int:
    """All formats, one after the other."""
    parser = argparse.ArgumentParser(description="A short real run of each format.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        run = prepare_sentences(Path(folder))
        for packing in FORMATS:
            kill_at = random.Random(packing).randint(8, 50)
            results.append(run_format(run, Path(folder), packing, kill_at))
            print(json.dumps(results[-1]), flush=True)
            record = {"provenance": provenance(), "steps": STEPS, "short_steps": SHORT_STEPS}
            args.output.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
