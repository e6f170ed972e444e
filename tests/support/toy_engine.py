"""A tiny tensor-parallel model and its training loop, for tests of the engines.

Two blocks, LayerNorms, a tied embedding and an odd width, so that partitions need padding. The
weights and data of every layout are slices of the same logical ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_deberta.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.distributed.collectives import (
    copy_to_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
)
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine, ParameterState, StepOutcome
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.engine.schedule import learning_rate

VOCAB, WIDTH, INNER, MICRO_BATCH, MICRO_BATCHES = 11, 7, 12, 2, 2
TOTAL_STEPS = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Placement:
    dim: int | None


class Block(nn.Module):
    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self.group = groups.tp_group
        self.up = nn.Linear(WIDTH, INNER // groups.tp_size)
        self.down = nn.Linear(INNER // groups.tp_size, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(copy_to_tensor_parallel_region(x, self.group)))
        return self.norm(x + reduce_from_tensor_parallel_region(self.down(inner), self.group))


class Toy(nn.Module):
    """Next-token-like classification: ids [B, N] -> mean cross-entropy (fp32 scalar)."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(groups) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.head(x), self.token.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), (ids * 3 + 1).flatten() % VOCAB)


def split_dim(name: str) -> int | None:
    if ".up." in name:
        return 0
    return 1 if ".down." in name else None


def toy_specs(module: nn.Module) -> dict[str, Placement]:
    return {name: Placement(split_dim(name)) for name, _ in module.named_parameters()}


def build_toy(
    groups: ProcessGroups, dtype: str, partition: Callable[[nn.Module], None] | None = None
) -> Toy:
    module = Toy(groups).to(DTYPES[dtype])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for path, child in module.named_modules():
            for leaf, parameter in child.named_parameters(recurse=False):
                name = f"{path}.{leaf}"
                shape, dim = list(parameter.shape), split_dim(name)
                if dim is not None:
                    shape[dim] *= groups.tp_size
                logical = torch.randn(shape, generator=generator) * 0.3 + ("norm.w" in name)
                parameter.copy_(local_part(logical, name, groups))
            if partition and next(child.parameters(recurse=False), None) is not None:
                partition(child)
    return module


def local_part(logical: Tensor, name: str, groups: ProcessGroups) -> Tensor:
    dim = split_dim(name)
    return logical if dim is None else logical.chunk(groups.tp_size, dim)[groups.tp_rank]


def toy_config(
    engine: str,
    dtype: str = "fp32",
    stage: int = 1,
    *,
    dp_size: int = 1,
    clip: float = 0.5,
    scale_window: int = 1000,
    bias_correction: bool = True,
) -> RunConfig:
    return RunConfig(
        parallel=ParallelConfig(
            engine=engine,  # type: ignore[arg-type]
            zero_stage=stage,  # type: ignore[arg-type]
        ),
        precision=PrecisionConfig(
            dtype=dtype,  # type: ignore[arg-type]
            initial_loss_scale_power=8,
            loss_scale_window=scale_window,
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-2,
            warmup_steps=2,
            clip_grad_norm=clip,
            weight_decay=0.1,
            bias_correction=bias_correction,
        ),
        train=TrainConfig(
            global_batch_size=MICRO_BATCH * MICRO_BATCHES * dp_size, micro_batch_size=MICRO_BATCH
        ),
    )


def start(config: RunConfig, groups: ProcessGroups) -> Engine:
    module = build_toy(groups, config.precision.dtype)
    return build_engine(config, module, toy_specs(module), groups)


def micro_batch(step: int, index: int, groups: ProcessGroups) -> Tensor:
    """Return ids [B, 5] of one micro batch; the global batch is the same on all layouts."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(
        0, VOCAB, (MICRO_BATCH * MICRO_BATCHES * groups.dp_size, 5), generator=generator
    )
    unit = MICRO_BATCH * groups.dp_size
    first = index * unit + groups.dp_rank * MICRO_BATCH
    return rows[first : first + MICRO_BATCH]


def train(
    engine: Engine,
    config: RunConfig,
    groups: ProcessGroups,
    steps: range,
    loss_factors: Mapping[int, float] | None = None,
) -> list[tuple[StepOutcome, float]]:
    """Run steps; return the outcome of each and this rank's last loss."""
    history = []
    for step in steps:
        factor = (loss_factors or {}).get(step, 1.0) / MICRO_BATCHES
        for index in range(MICRO_BATCHES):
            loss = engine.module(micro_batch(step, index, groups))
            engine.backward(loss * factor)
        rate = learning_rate(step, config.optimizer, TOTAL_STEPS)
        history.append((engine.step(rate), loss.item()))
    return history


def states(engine: Engine) -> dict[str, ParameterState]:
    """Return copies of the whole states of all parameters. Collective: data-parallel ranks."""
    shapes = {n: getattr(p, "ds_shape", p.shape) for n, p in engine.module.named_parameters()}
    group = engine.parts[0]._groups.dp_group
    found = {}
    for name, start, tensors in engine.local_shards():
        wholes = torch.full((len(tensors), math.prod(shapes[name])), -math.inf)
        for whole, tensor in zip(wholes, tensors, strict=True):
            whole[start : start + len(tensor)] = tensor.cpu()
        if group is not None:
            dist.all_reduce(wholes, dist.ReduceOp.MAX, group)
        found[name] = ParameterState(*(whole.view(shapes[name]) for whole in wholes))
    return found


def assert_same_states(
    actual: dict[str, ParameterState], expected: dict[str, ParameterState], **tolerance: float
) -> None:
    """Compare all tensors of two states, bit by bit unless a tolerance is given."""
    assert list(actual) == list(expected)
    for name in actual:
        for field in ("weight", "exp_avg", "exp_avg_sq", "ema"):
            a, b = getattr(actual[name], field), getattr(expected[name], field)
            if a is None and b is None:
                continue
            torch.testing.assert_close(
                a,
                b,
                rtol=tolerance.get("rtol", 0.0),
                atol=tolerance.get("atol", 0.0),
                msg=lambda text, where=f"{name} {field}": f"{where}: {text}",
            )
