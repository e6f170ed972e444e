"""Small run folders for tests of the report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_deberta.config import save_config
from megatron_deberta.config.schema import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from megatron_deberta.data.shards.format import manifest_path
from megatron_deberta.data.shards.manifest import ShardManifest, encode_manifest

BEGIN = 1_790_000_000.0
STEPS = 40


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(folder: Path, learning_rate: float = 1e-3) -> Path:
    """Write every file of a run that the report reads; one restart, one fault."""
    folder.mkdir(parents=True)
    shard = str(folder / "books_text_document")
    manifest = ShardManifest(
        tokenizer_fingerprint="f", tokenizer_path="", vocab_size=600, dtype="uint16",
        num_documents=1200, num_sequences=1200, num_tokens=30_000, bin_sha256="", idx_sha256="",
        sources=("books.jsonl",), documents_in=1205, documents_empty=3, documents_quarantined=2,
    )  # fmt: skip
    Path(manifest_path(shard)).write_bytes(encode_manifest(manifest))
    config = RunConfig(
        data=DataConfig(train=(shard,), validation=(str(folder / "absent"),)),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        train=TrainConfig(run_dir=str(folder), steps=STEPS),
    )
    save_config(config, folder / "config.yaml")
    write_lines(folder / "metrics.jsonl", _metrics(learning_rate))
    write_lines(folder / "timeline.jsonl", _timeline())
    write_lines(folder / "chain.jsonl", _history())
    write_lines(folder / "samples.jsonl", [_samples(step) for step in (20, 40)])
    curve = folder / "finetuned" / "sst2" / "curve.json"
    curve.parent.mkdir(parents=True)
    scores = [{"step": step, "samples": 1, "mean": 0.5 + step / 100} for step in (20, 40)]
    curve.write_text(json.dumps({"task": "sst2", "metric": "accuracy", "points": scores}))
    return folder


def _metrics(learning_rate: float) -> Iterable[dict[str, Any]]:
    yield {"step": 0, "kind": "validation", "unigram_loss": 6.5, "num_targets": 10}
    for step in range(1, STEPS + 1):
        yield {
            "step": step, "kind": "train", "loss": 9 - step / 10, "grad_norm": 1.0 + step % 3,
            "learning_rate": learning_rate, "tokens_per_second": 100.0, "utilization": 0.25,
            "loss_scale": 1.0,
        }  # fmt: skip
        if step % 20 == 0:
            loss = {"loss": 8.5 - step / 10, "masked_accuracy": step / 100}
            yield {"step": step, "kind": "validation", **loss}
            yield {"step": step, "kind": "minimal_pairs", "accuracy": 0.6, "accuracy_syntax": 0.7}
            yield {"step": step, "kind": "checkpoint", "seconds": 0.5, "checkpoint_step": step}
    yield {"step": 7, "kind": "guard", "skip": "gradient spike", "loss": 9.0, "grad_norm": 99.0}


def _timeline() -> Iterable[dict[str, Any]]:
    for first, last, start in ((0, 30, BEGIN), (20, STEPS, BEGIN + 7200)):
        yield {"event": "start", "time": start, "step": first, "world_size": 2}
        for step in range(first + 1, last + 1):
            seconds = {"forward": 1.0, "step": 2.0, "data": 0.5, "log": 0.1, "evaluation": 0.4}
            yield {
                "event": "steps", "time": start + 60 * (step - first), "step": step,
                "seconds": seconds, "memory_bytes": 2**30,
            }  # fmt: skip
    yield {"event": "end", "time": BEGIN + 9000, "step": STEPS, "reason": ""}


def _history() -> Iterable[dict[str, Any]]:
    yield {"event": "start", "time": BEGIN, "link": "7.0", "step": 0, "nodes": "n[1-2]"}
    reason = "rank 1 on n2: <b>killed</b> by SIGKILL"
    yield {
        "event": "end", "time": BEGIN + 1800, "link": "7.0", "step": 20, "code": 1,
        "goes_on": True, "reason": reason,
    }  # fmt: skip
    yield {"event": "start", "time": BEGIN + 7200, "link": "7.1", "step": 20, "nodes": "n1"}


def _samples(step: int) -> dict[str, Any]:
    word = "▁mat" if step > 20 else "▁the"
    predictions = [[word, 0.5], ["▁<i>dog</i>", 0.25]]
    masks = [{"position": 3, "token": "▁mat", "predictions": predictions}]
    pieces = ["[CLS]", "▁on", "▁the", "[MASK]", "[SEP]"]
    return {"step": step, "samples": [{"sample": 4, "pieces": pieces, "masks": masks}]}
