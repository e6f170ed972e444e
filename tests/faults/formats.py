"""A short run of each packing format, killed and resumed; the result must be bit-identical.

``python -m tests.faults.formats --output FILE`` runs all four formats on text of this machine; the
test suite runs one.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.provenance import provenance
from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.data.sample_log import check_sample_log, read_sample_log
from tests.support.jobs import assert_same_checkpoints, losses, prepare, records, run_to_end, start

FORMATS = ("full_sentences", "doc_sentences", "segment_pair", "sentence_pair")
STEPS, SHORT_STEPS, BATCH = 60, 15, 8


def run_format(run: Path, folder: Path, packing: str, kill_at: int) -> dict[str, Any]:
    """Compare a run that is killed and resumed with an uninterrupted one.

    Args:
        run: config of a run on a shard of sentences.
        folder: of the two runs.
        packing: the format.
        kill_at: step after which the second run is killed with SIGKILL.

    Returns:
        The result for the JSON file.
    """
    overrides = [f"data.packing={packing}", f"data.short_steps={SHORT_STEPS}"]
    overrides += ["data.short_sequence_length=32", "checkpoint.save_every=6"]
    # Without DeepSpeed, a start takes half the time; the layout matrix covers pairs with DeepSpeed.
    overrides += ["parallel.engine=plain", "parallel.zero_stage=0"]
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
    result = {
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
        result["next_sentence_loss_first_5"] = sum(pairs[:5]) / 5
        result["next_sentence_loss_last_5"] = sum(pairs[-5:]) / 5
    return result


def main() -> int:
    """Run all formats, one after the other."""
    parser = argparse.ArgumentParser(description="A short run of each packing format.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(Path(folder), sentences=True)
        for packing in FORMATS:
            kill_at = random.Random(packing).randint(8, 50)
            results.append(run_format(run, Path(folder), packing, kill_at))
            print(json.dumps(results[-1]), flush=True)
            record = {"provenance": provenance(), "steps": STEPS, "short_steps": SHORT_STEPS}
            args.output.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
