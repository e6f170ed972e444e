"""Gradients and steps on the device compared with the CPU in float32 with the reference backend.

Dropout is on, because its bits do not depend on the device. Two comparisons start from the same
weights and batch: gradients of the model, and five optimizer steps of the training engine. In 16
bits the tolerance is 1.5 times the error of the same step in the same format on the CPU, without
fused kernels.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.record import Item, Record
from benchmarks.lib.tolerances import FP32_MODEL
from megatron_deberta.config import config_from_dict, config_to_dict
from megatron_deberta.config.schema import ModelConfig, RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model import DropoutSeeds, ModelInputs
from megatron_deberta.train.setup import DTYPES
from megatron_deberta.train.step import TrainStep

LENGTH, ROWS, STEPS = 160, 4, 5
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=256,
    num_heads=4,
    ffn_hidden_size=1024,
    vocab_size=2048,
    max_position_embeddings=LENGTH,
    max_relative_positions=64,  # distances beyond the table, and no multiple of a tile
    position_buckets=32,
    conv_kernel_size=3,
)
SMALL = replace(MODEL, num_layers=2, hidden_size=128, num_heads=2, ffn_hidden_size=256)
SLACK = 1.5


def run(record: Record) -> None:
    """Compare gradients by format and backend, then steps."""
    model = SMALL if record.options.small else MODEL
    device = record.options.device
    for dtype in ("fp32", "bf16", "fp16"):
        if dtype == "fp16" and device == "cpu":
            continue  # not supported by DeepSpeed
        for backend in usable_backends(device):
            record.run(
                f"gradients {dtype} {backend}",
                lambda d=dtype, b=backend: compare_gradients(model, device, d, b),
            )
    for dtype in ("fp32", "bf16"):
        record.run(f"steps {dtype}", lambda d=dtype: compare_steps(model, device, d))


def usable_backends(device: str) -> list[str]:
    """Return the backends to compare; a GPU without ``triton`` is an error."""
    return ["triton", "chunked"] if device == "cuda" else ["chunked"]


def run_config(model: ModelConfig, dtype: str, backend: str, engine: str) -> RunConfig:
    """Return the config of a short run."""
    sections = {
        "model": config_to_dict(model),
        "data": {"sequence_length": LENGTH},
        "parallel": {"attention_backend": backend, "engine": engine, "zero_stage": 1},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "precision": {"dtype": dtype},
        "train": {"steps": 100, "global_batch_size": ROWS, "micro_batch_size": ROWS},
    }
    return config_from_dict(sections, "parity")


def make_batch(model: ModelConfig) -> Batch:
    """Return random tokens, 15 % of them masked, with padding in the last third of the last row."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, model.vocab_size, (ROWS, LENGTH), generator=generator)
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    real[-1, -LENGTH // 3 :] = False
    order = torch.rand(ROWS, LENGTH, generator=generator).masked_fill(~real, 2.0).argsort(1)
    positions = order[:, : round(0.15 * LENGTH)].sort(1).values
    labels = ids.gather(1, positions)
    return Batch(
        ModelInputs(ids.scatter(1, positions, 4), real), positions, labels, torch.arange(ROWS)
    )


def gradients(
    model: ModelConfig, device: str, dtype: str, backend: str
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and its gradients, float64 on the CPU."""
    config = run_config(model, dtype, backend, "plain")
    groups = single_process_groups(torch.device(device, 0))
    module = build_model(config, groups, DTYPES[dtype]).module.train()
    batch = make_batch(model).to(device)
    loss = module(batch, DropoutSeeds(1, 0, batch.sample_index)).losses["masked"].loss
    loss = loss / batch.labels.numel()
    scale = 4096.0 if dtype == "fp16" else 1.0
    (loss * scale).backward()
    named = module.named_parameters()
    return float(loss.detach()), {
        n: p.grad.double().cpu() / scale for n, p in named if p.grad is not None
    }


@functools.cache
def cpu_gradients(model: ModelConfig, dtype: str, backend: str) -> tuple[float, dict[str, Tensor]]:
    """Return the expected loss and gradients."""
    return gradients(model, "cpu", dtype, backend)


def distance(
    actual: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]
) -> dict[str, float]:
    """Return relative errors of the loss, of all gradients together and of the worst parameter."""
    parts = {
        name: (float((actual[1][name] - grad).norm()), float(grad.norm()))
        for name, grad in expected[1].items()
    }
    whole = sum(size**2 for _, size in parts.values()) ** 0.5
    return {
        "loss": abs(actual[0] - expected[0]) / abs(expected[0]),
        "gradient": sum(error**2 for error, _ in parts.values()) ** 0.5 / whole,
        # Very small gradients are dominated by rounding.
        "worst parameter": max(e / s for e, s in parts.values() if s > 1e-3 * whole),
    }


def compare_gradients(model: ModelConfig, device: str, dtype: str, backend: str) -> Item:
    """Compare one forward and backward."""
    torch.backends.cudnn.allow_tf32 = False
    expected = cpu_gradients(model, "fp32", "reference")
    errors = distance(gradients(model, device, dtype, backend), expected)
    if dtype == "fp32":
        bounds = dict.fromkeys(errors, FP32_MODEL["rtol"])
    else:
        cpu_errors = distance(cpu_gradients(model, dtype, "reference"), expected)
        # The error of one number, the loss, may be small by chance.
        bounds = {key: SLACK * error for key, error in cpu_errors.items()} | {"loss": 2e-3}
    large = {key: bound for key, bound in bounds.items() if not errors[key] <= bound}
    wrong = [f"error of {key} {errors[key]:.1e} > {bound:.1e}" for key, bound in large.items()]
    return {"off": errors, "bounds": bounds, "wrong": wrong}


def steps(model: ModelConfig, device: str, dtype: str, engine: str, backend: str) -> list[float]:
    """Return the losses of some optimizer steps."""
    config = run_config(model, dtype, backend, engine)
    groups = single_process_groups(torch.device(device, 0))
    built = build_model(config, groups, DTYPES[dtype])
    running = build_engine(config, built.module, built.specs, groups)
    try:
        take = TrainStep(running, config, groups)
        batch = make_batch(model)
        if device == "cuda":
            batch = batch.pin_memory()
        return [take(step, [batch]).loss for step in range(STEPS)]
    finally:
        running.destroy()


def compare_steps(model: ModelConfig, device: str, dtype: str) -> Item:
    """Compare the engine and backend of training with the plain engine on the CPU."""
    expected = steps(model, "cpu", "fp32", "plain", "reference")
    losses = steps(model, device, dtype, "deepspeed", "auto")
    error = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    bound = FP32_MODEL["rtol"] if dtype == "fp32" else 1e-2
    wrong = [] if error <= bound else [f"error of losses {error:.1e} > {bound:.1e}"]
    if not losses[-1] < losses[0]:
        wrong.append(f"the loss does not fall: {losses}")
    return {"losses": losses, "cpu_losses": expected, "off": {"loss": error}, "wrong": wrong}


def table(items: dict[str, Item]) -> list[str]:
    """Return lines for the terminal."""
    return [
        f"  {name:26}"
        + "  ".join(f"{key} error {value:.1e}" for key, value in item.get("off", {}).items())
        for name, item in items.items()
    ]
