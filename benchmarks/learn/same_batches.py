"""Learning curve of transformers' DeBERTa on the batches of a run of this project.

Reads the run's resolved config, trains ``DebertaV2ForMaskedLM`` (without mask decoder and absolute
positions) on the same rows, masks, schedule and optimizer settings, and validates on the same
targets at the same steps. Writes both curves as JSON and PNG.

    python -m benchmarks.learn.same_batches --run runs/books/run --steps 300 \
        --output benchmarks/results/cpu/same_batches
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import DebertaV2ForMaskedLM

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import provenance
from benchmarks.lib.stock import stock_config
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.build import build_loaders, tokenizer_path
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.observe.metrics import read_metrics
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL
from megatron_deberta.tokenizer import load_tokenizer


def loss_sum(model: DebertaV2ForMaskedLM, batch: Batch) -> tuple[torch.Tensor, int]:
    """Return the summed cross-entropy of transformers' own forward, and the number of targets."""
    labels = torch.full_like(batch.inputs.input_ids, IGNORED_LABEL)
    valid = batch.labels != IGNORED_LABEL
    rows = torch.where(valid)[0]
    labels[rows, batch.masked_positions[valid]] = batch.labels[valid]
    count = int(valid.sum())
    mean = model(batch.inputs.input_ids, batch.inputs.is_token.long(), labels=labels).loss
    return mean * count, count


def validate(model: DebertaV2ForMaskedLM, batches: Iterable[Batch]) -> float:
    """Return the mean validation loss in nats."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            loss, targets = loss_sum(model, batch)
            total, count = total + loss.item(), count + targets
    model.train()
    return total / count


def optimizer_for(model: torch.nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """Return AdamW with the run's settings and without decay of biases and layer norms."""
    groups: dict[float, list[torch.nn.Parameter]] = {config.optimizer.weight_decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        is_exempt = name.endswith(("bias", "LayerNorm.weight"))
        groups[0.0 if is_exempt else config.optimizer.weight_decay].append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for decay, params in groups.items()],
        betas=(config.optimizer.beta1, config.optimizer.beta2), eps=config.optimizer.eps,
        fused=True,
    )  # fmt: skip


def train(config: RunConfig, last_step: int) -> Iterator[list[dict[str, float]]]:
    """Train the peer to ``last_step``; yield its curve after each validation."""
    torch.manual_seed(config.train.seed)
    vocabulary = Vocabulary.of(load_tokenizer(tokenizer_path(config)))
    loader, validation = build_loaders(config, vocabulary, 0, 1, 0)
    assert validation is not None
    model = DebertaV2ForMaskedLM(stock_config(config.model)).train()
    optimizer = optimizer_for(model, config)
    curve: list[dict[str, float]] = []
    start = time.monotonic()
    for step, batches in enumerate(loader):
        if step == last_step:
            break
        parts = [loss_sum(model, batch) for batch in batches]
        (sum(part for part, _ in parts) / sum(count for _, count in parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer, config.train.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % config.train.eval_every == 0 or step + 1 == last_step:
            loss = validate(model, validation)
            minutes = (time.monotonic() - start) / 60
            curve.append({"step": step + 1, "loss": loss})
            print(f"step {step + 1} validation {loss:.4f} after {minutes:.1f} min", flush=True)
            yield curve


def plot(record: dict[str, Any], path: Path) -> None:
    """Plot both curves and the unigram loss."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4))).subplots()
    for name, label in (("ours", "megatron_deberta"), ("huggingface", "transformers")):
        tokens, losses = zip(*((p["tokens"] / 1e6, p["loss"]) for p in record[name]), strict=True)
        axes.plot(tokens, losses, marker="o", label=label)
    axes.axhline(record["unigram_loss"], linestyle="--", color="grey", label="unigram")
    axes.set(xlabel="million tokens", ylabel="validation loss (nats per masked token)")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def write(run: Path, config: RunConfig, peer: list[dict[str, float]], output: Path) -> None:
    """Write both curves so far as JSON and PNG."""
    records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "validation"]
    tokens_per_step = config.train.global_batch_size * config.data.sequence_length
    record = {
        **provenance(),
        "what": "validation loss on the same batches, masks, schedule and optimizer settings",
        "unigram_loss": [r["unigram_loss"] for r in records if "unigram_loss" in r][-1],
        "ours": [{"step": r["step"], "loss": r["loss"]} for r in records if "loss" in r],
        "huggingface": peer,
    }
    for name in ("ours", "huggingface"):
        for point in record[name]:
            point["tokens"] = point["step"] * tokens_per_step
    write_json(output.with_suffix(".json"), record)
    plot(record, output.with_suffix(".png"))


def main() -> None:
    """Train the peer; both curves are written after each of its validations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the finished run")
    parser.add_argument("--output", type=Path, required=True, help="path without .json and .png")
    parser.add_argument("--steps", type=int, required=True, help="steps of the peer")
    args = parser.parse_args()
    config = load_config(str(args.run / "config.yaml"))
    for peer in train(config, args.steps):
        write(args.run, config, peer, args.output)


if __name__ == "__main__":
    main()
