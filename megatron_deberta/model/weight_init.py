"""Weight initialisation as a function of (seed, canonical name, element index).

No generator is used, so each tensor-parallel rank fills its own slice and all layouts start from
the same weights.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.ops.dropout_bits import mix_seed

_CHUNK_ELEMENTS = 1 << 18
_CONVOLUTION = ".encoder.conv.conv."
ADAPTER_FACTORS = (".lora.A", ".lora.B")
"""Ends of the names of a low-rank adapter's parameters, after that of the layer."""


def fill_initial(
    out: Tensor,
    name: str,
    logical_shape: tuple[int, ...],
    config: ModelConfig,
    seed: int,
    *,
    dim: int | None = None,
    offset: int = 0,
) -> None:
    """Initialise a slice of parameter ``name`` in place.

    Weights are N(0, ``initializer_range``), LayerNorm weights 1, biases and the delta of shared
    embeddings 0, as in the released code. The convolution's weights and biases are uniform
    between +-1 / sqrt(fan-in), as the released code leaves them: its ``init_weights`` changes
    Linear and Embedding only (``torch.nn.Conv1d``'s defaults). ``conv_init=normal`` treats them
    like the others. Of a low-rank adapter, A is uniform between the same limits and B is 0, as in
    peft.

    Args:
        out: the slice, ``[*logical_shape]`` except along ``dim``; written.
        name: canonical name (docs/architecture.md).
        logical_shape: shape of the full parameter.
        config: the architecture.
        seed: seed of the run.
        dim: dimension along which ``out`` is a slice; None: the full parameter.
        offset: first index of the slice along ``dim``.
    """
    if name.endswith("norm.weight"):
        out.fill_(1.0)
        return
    is_convolution = config.conv_init == "microsoft" and _CONVOLUTION in f".{name}"
    is_uniform = is_convolution or name.endswith(ADAPTER_FACTORS[0])
    if name.endswith(("bias", ".delta.weight", ADAPTER_FACTORS[1])) and not is_uniform:
        out.zero_()
        return
    scale = config.initializer_range
    if is_convolution:
        assert config.conv_kernel_size is not None
        scale = 1 / math.sqrt(config.hidden_size * config.conv_kernel_size)
    elif is_uniform:
        scale = 1 / math.sqrt(logical_shape[1])
    draw = symmetric_uniform if is_uniform else standard_normal
    key = zlib.crc32(name.encode())
    split = 0 if dim is None else dim
    inner = math.prod(out.shape[split + 1 :])
    local_block, logical_block = out.shape[split] * inner, logical_shape[split] * inner
    flat = out.view(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        stop = min(start + _CHUNK_ELEMENTS, flat.numel())
        local = torch.arange(start, stop, device=out.device)
        index = (local // local_block) * logical_block + offset * inner + local % local_block
        values = draw(mix_seed(seed, key, index))
        flat[start:stop] = (values * scale).to(out.dtype)


def draw_seed() -> int:
    """Draw a seed from torch's default CPU generator."""
    return int(torch.randint(2**62, (), device="cpu"))


def symmetric_uniform(bits: Tensor) -> Tensor:
    """Return fp64 values of U(-1, 1) from 53 of each element's 64 random bits.

    Args:
        bits: int64, any shape.
    """
    return (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) / (1 << 52) - 1


def standard_normal(bits: Tensor) -> Tensor:
    """Return N(0, 1) values from 48 of each element's 64 random bits, by the Box-Muller transform.

    In fp64, so that devices agree after rounding.

    Args:
        bits: int64, any shape.
    """
    radius_bits = (bits >> 40) & 0xFFFFFF
    angle_bits = (bits >> 16) & 0xFFFFFF
    radius = torch.sqrt(-2.0 * torch.log((radius_bits.double() + 0.5) / (1 << 24)))
    return radius * torch.cos(2.0 * math.pi * (angle_bits.double() + 0.5) / (1 << 24))


@torch.no_grad()
def init_parameters(module: nn.Module, config: ModelConfig, seed: int | None) -> None:
    """Initialise all parameters of an unsharded model; those on the ``meta`` device are skipped.

    Args:
        module: the model.
        config: its architecture.
        seed: as in `fill_initial`; None: drawn from torch's default generator.
    """
    parameters = {n: p for n, p in module.named_parameters() if not p.is_meta}
    if parameters and seed is None:
        seed = draw_seed()
    for name, parameter in parameters.items():
        fill_initial(parameter, name, tuple(parameter.shape), config, seed or 0)
