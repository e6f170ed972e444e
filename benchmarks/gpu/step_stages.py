"""Stages of the first contact with a GPU that take training steps.

As in ``operator_stages``, each function runs its items, the most important first.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import one_step, train
from benchmarks.gpu import step as whole_step
from benchmarks.gpu.peers import TINY
from benchmarks.gpu.record import Item, Record
from benchmarks.step.batch import make_batch
from benchmarks.step.measure import compete
from benchmarks.step.peers import Peer, variants
from benchmarks.step.sides import Ours, Setting, Stock, without_mask_decoder
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.distributed.topology import shutdown
from megatron_deberta.hf import use_fast_attention
from megatron_deberta.observe.throughput import measure_matmul_rate

DEPTHS = (4, 12)
RESUMED = train.Size(
    8.0,
    8192,
    60,
    (
        "model.vocab_size=8200 precision.dtype=bf16 train.global_batch_size=64 "
        "train.micro_batch_size=64 checkpoint.save_every=20 train.eval_every=null "
        "train.eval_batches=2 optimizer.warmup_steps=5"
    ),
    -0.3,  # sixty steps learn little more than frequencies
)
LONG = 24528
"""Tokens of the longest row that published DeBERTa models are used with."""


def layers(record: Record) -> None:
    """Steps of 1.5B width in the plain engine by depth; the difference is the time of the layers.

    With the fused kernels (or what replaces them) and with plain attention.
    """
    shards = whole_step.shards_of(record)
    small = record.options.small
    tokens, length = (256, 64) if small else (16384, 512)
    for depth in (1, 2) if small else DEPTHS:
        for plain in (False, True):
            name = f"{depth} layers" + ", plain attention" * plain
            overrides = [
                *whole_step.overrides(record, shards, tokens, length),
                f"model.num_layers={depth}",
                "parallel.engine=plain",
                f"train.micro_batch_size={tokens // length}",
                *(one_step.PLAIN_ATTENTION if plain else ()),
            ]
            record.run(name, partial(time_steps, overrides, plain, 2 if small else 10))


def time_steps(overrides: list[str], plain: bool, steps: int) -> Item:
    """Return the seconds and the losses of steps in this process."""
    config = load_config(str(whole_step.RUN), overrides)
    try:
        run = one_step.Run(config, plain)
        losses = [run.take()[0] for _ in range(3)]
        taken = [run.take() for _ in range(steps)]
    finally:
        shutdown()
    losses += [loss for loss, _ in taken]
    found = {
        "seconds_per_step": statistics.median(seconds for _, seconds in taken),
        "tokens_per_step": config.train.global_batch_size * config.data.sequence_length,
        "vocabulary": config.model.vocab_size,
        "losses": losses,
    }
    return found | {"wrong": whole_step.wrong_losses(found)}


def step(record: Record) -> None:
    """The whole 1.5B step with DeepSpeed, with a trace; then the same with plain attention."""
    first, second, *_ = whole_step.SMALL if record.options.small else whole_step.FULL
    steps = ["--steps", "2" if record.options.small else "12"]
    trace = record.options.work / "trace.json.gz"
    traced = [*steps, "--trace", str(trace)]
    record.run(first.name, lambda: whole_step.measure(record, first, traced))
    record.run(second.name, lambda: whole_step.measure(record, second, steps))


def models(record: Record) -> None:
    """Training steps of DeBERTa-base and ModernBERT-base on the same batch, N=512."""
    device, small = torch.device(record.options.device), record.options.small
    tokens, length, dtype = (16384, 512, torch.bfloat16) if device.type == "cuda" else (
        256, 64, torch.float32
    )  # fmt: skip
    model = replace(TINY if small else ModelConfig(), vocab_size=512 if small else 50368)
    batch = make_batch(model, tokens, length, device)
    usable = [name for name in variants("modernbert", device)[0] if "flex" not in name]
    for compiled in (False, True):
        # Without compilation first: it may take longer than the stage has.
        setting = Setting(model, device, dtype, compile_peers=compiled and not small)
        builds = {
            "ours": partial(Ours, setting, fuse=device.type == "cuda"),
            "modernbert": partial(Peer, setting, "modernbert", usable[0], length),
        }
        name = "DeBERTa-base, ModernBERT-base" + " compiled" * compiled
        record.run(name, partial(race, builds, batch, setting, tokens, small))


def race(builds: dict[str, Any], batch: Any, setting: Setting, tokens: int, small: bool) -> Item:
    """Time the steps of several sides in turns."""
    rate = measure_matmul_rate(setting.device, setting.dtype)
    results = compete(builds, batch, 1 if small else 8, resident=True)
    sides = {}
    for name, result in results.items():
        seconds = statistics.median(result.seconds)
        sides[name] = {
            **result.notes,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": tokens / seconds * result.flops_per_token / rate,
            "peak_bytes": result.peak_bytes,
        }
    return {"sides": sides, "tokens": tokens}


def resume(record: Record) -> None:
    """A run with DeepSpeed that is killed and started again."""
    size = train.SMALL if record.options.small else RESUMED
    record.run("killed and resumed", lambda: train.killed_and_resumed(record, size))


def extras(record: Record) -> None:
    """``use_fast_attention`` against the stock model, and a step on a row of 24,528 tokens."""
    device, small = torch.device(record.options.device), record.options.small
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, length = (4, 64) if small else (32, 512)
    model = replace(TINY if small else ModelConfig(), vocab_size=512 if small else 50368)
    setting = Setting(without_mask_decoder(model), device, dtype)
    record.run("accelerate", lambda: accelerated(setting, rows * length, length, small))
    longest = 128 if small else LONG
    long = Setting(replace(model, max_position_embeddings=longest), device, dtype)
    record.run(f"a row of {longest} tokens", lambda: long_row(long, longest, small))


def accelerated(setting: Setting, tokens: int, length: int, small: bool) -> Item:
    """Time training steps of the stock model, with and without ``use_fast_attention``."""
    batch = make_batch(setting.model, tokens, length, setting.device)

    def build() -> Stock:
        side = Stock(setting)
        use_fast_attention(side.model)
        return side

    found = race({"ours": build, "stock": partial(Stock, setting)}, batch, setting, tokens, small)
    check = replace(setting.model, num_layers=2, hidden_dropout=0.0, attention_dropout=0.0)
    side = Stock(Setting(check, setting.device, torch.float32))
    with torch.no_grad():
        stock = float(side.loss(batch, 1))
        with use_fast_attention(side.model):
            difference = abs(float(side.loss(batch, 1)) - stock) / stock
    wrong = [] if difference < 1e-4 else [f"the losses differ by {difference:.1e}"]
    return {**found, "loss_difference": difference, "wrong": wrong}


def long_row(setting: Setting, length: int, small: bool) -> Item:
    """Train on one row; the loss must be finite."""
    batch = make_batch(setting.model, length, length, setting.device)
    build = partial(Ours, setting, fuse=setting.device.type == "cuda")
    found = race({"ours": build}, batch, setting, length, small)
    with torch.no_grad():
        loss: Tensor = build().loss(batch, 1)
    return {**found, "loss": float(loss), "wrong": [] if loss.isfinite() else ["not finite"]}
