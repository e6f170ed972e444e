"""Implementations of disentangled attention with one interface, and plain attention as a baseline.

A variant takes a case and the five tensors of ``disentangled_attention`` and returns the output
``[batch, heads, length, head size]``. ``refusal`` returns the reason why a variant cannot run a
case.

Other libraries are called as their own models call them, without the projections, which are not
part of the operator: transformers 5.23 (``DisentangledSelfAttention``), disentangled-flash 1.1.1
(``TritonTrainingDisentangledSelfAttention``), flashdeberta 0.0.8
(``FlashDisentangledSelfAttention``: packed from 1,024 tokens on where there is padding).
"""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DisentangledSelfAttention,
    build_relative_position,
)

from megatron_deberta.ops import RelativePositions, disentangled_attention

BUCKETS, MAX_DISTANCE, HEAD_SIZE = 256, 512, 64
POSITIONS = RelativePositions(MAX_DISTANCE, BUCKETS)
SLOTS = 2 * BUCKETS
SCALE = 1 / math.sqrt(3 * HEAD_SIZE)
SEED = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison."""

    batch: int
    heads: int
    length: int
    dropout: float = 0.0
    padding: bool = False
    dtype: str = "fp32"
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Return the name in the report, such as ``B4 H12 N512 fp32 dropout padding``."""
        words = [f"B{self.batch}", f"H{self.heads}", f"N{self.length}", self.dtype]
        words += ["dropout"] * (self.dropout > 0) + ["padding"] * self.padding
        return " ".join(words)

    def row_lengths(self) -> list[int]:
        """Return the unpadded length of each row: all, or from half to nearly all of the row."""
        if not self.padding:
            return [self.length] * self.batch
        step = self.length / (2 * self.batch)
        return [self.length - round((row + 1) * step) for row in range(self.batch)]

    def real_keys(self) -> Tensor:
        """Return the mask of unpadded tokens, bool ``[batch, length]``."""
        return _real_keys(self)


@lru_cache(maxsize=4)  # copying it to a GPU would make the host wait
def _real_keys(case: Case) -> Tensor:
    lengths = torch.tensor(case.row_lengths(), device=case.device)
    return torch.arange(case.length, device=case.device) < lengths[:, None]


def make_inputs(case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return q, k, v, pos_key, pos_query: fixed random tensors of unit variance with gradients.

    Args:
        case: the sizes; values are rounded to its dtype.
        dtype: dtype of the tensors; None: the case's.
    """
    generator = torch.Generator(case.device).manual_seed(0)
    shape = (case.batch, case.heads, case.length, HEAD_SIZE)
    table = (case.heads, SLOTS, HEAD_SIZE)
    rounded = (
        torch.randn(s, generator=generator, device=case.device).to(DTYPES[case.dtype])
        for s in (shape, shape, shape, table, table)
    )
    return [x.to(dtype or DTYPES[case.dtype]).requires_grad_() for x in rounded]


class Variant:
    """One implementation of the operator.

    Args:
        forward: computes the output; subclasses override ``_attend`` instead.

    Attributes:
        exact_dropout: drops the same elements as the reference, so results can be compared.
    """

    exact_dropout = False

    def __init__(self, forward: Callable[..., Tensor] | None = None) -> None:
        self._forward = forward

    def refusal(self, case: Case) -> str | None:
        """Return why this variant cannot run the case, or None."""
        return None

    def __call__(self, case: Case, *x: Tensor) -> Tensor:
        """Compute the output."""
        return self._attend(case, *x)

    def _attend(self, case: Case, *x: Tensor) -> Tensor:
        assert self._forward is not None
        return self._forward(case, *x)


class Ours(Variant):
    """This project's operator with one of its backends."""

    exact_dropout = True

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def _attend(self, case: Case, *x: Tensor) -> Tensor:
        padding = case.real_keys() if case.padding else None
        options = {"dropout_p": case.dropout, "seed": SEED, "backend": self.backend}
        return disentangled_attention(*x, positions=POSITIONS, attention_mask=padding, **options)

    def refusal(self, case: Case) -> str | None:
        """Return the operator's error for one row of one token, if any."""
        one = replace(case, batch=1, heads=1, length=1, padding=False)
        try:
            self(one, *make_inputs(one))
        except ValueError as refused:
            return str(refused)
        return None


class Eager(Variant):
    """The computation of transformers after its projections.

    Mask and slots are computed once, as its encoder does for all layers.
    """

    def _attend(self, case: Case, *x: Tensor) -> Tensor:
        module = _EagerTerms(case.heads, x[3], x[4])
        q, k, v = (t.flatten(0, 1) for t in x[:3])
        scores = torch.bmm(q, k.transpose(-1, -2) * SCALE)
        scores = scores + module.bias(q, k, _slots(case), module.rows, 3)
        scores = scores.view(case.batch, case.heads, case.length, case.length)
        scores = scores.masked_fill(~_pairs(case), torch.finfo(q.dtype).min)
        probabilities = F.dropout(scores.softmax(-1), case.dropout)
        return torch.bmm(probabilities.flatten(0, 1), v).view(x[0].shape)


@lru_cache(maxsize=1)  # keeps no large mask of earlier cases
def _pairs(case: Case) -> Tensor:
    """Return the attention mask of transformers' encoder, bool ``[B, 1, N, N]``."""
    real = case.real_keys()
    return (real[:, None, :] & real[:, :, None])[:, None]


@lru_cache(maxsize=1)
def _slots(case: Case) -> Tensor:
    """Return the bucketed distances of transformers' encoder, int64 ``[1, N, N]``."""
    rows = torch.empty(case.length, 1, device=case.device)
    return build_relative_position(rows, rows, BUCKETS, MAX_DISTANCE)


class _EagerTerms(nn.Module):
    """The bias function of transformers on tables that are already projected."""

    bias = DisentangledSelfAttention.disentangled_attention_bias
    transpose_for_scores = DisentangledSelfAttention.transpose_for_scores

    def __init__(self, heads: int, pos_key: Tensor, pos_query: Tensor) -> None:
        super().__init__()
        self.pos_att_type, self.share_att_key = ["c2p", "p2c"], False
        self.position_buckets, self.max_relative_positions = BUCKETS, MAX_DISTANCE
        self.pos_ebd_size, self.num_attention_heads = BUCKETS, heads
        self.pos_key_proj: Callable[[Any], Tensor] = lambda _: _flat(pos_key)
        self.pos_query_proj: Callable[[Any], Tensor] = lambda _: _flat(pos_query)
        self.rows = pos_key.new_empty(1, SLOTS, 1)  # only sliced for its rows


def _flat(table: Tensor) -> Tensor:
    return table.transpose(0, 1).flatten(1)[None]


def sdpa_with_bias(case: Case, *x: Tensor) -> Tensor:
    """Compute SDPA with the position terms gathered into a float bias."""
    q, k, v, pos_key, pos_query = x
    at = torch.arange(case.length, device=q.device)
    slots = POSITIONS.slots(at[:, None] - at).expand(case.batch, case.heads, -1, -1)
    bias = (q @ pos_key.transpose(-1, -2)).gather(-1, slots)
    from_keys = (k @ pos_query.transpose(-1, -2)).gather(-1, slots.transpose(-1, -2))
    bias = (bias + from_keys.transpose(-1, -2)) * SCALE
    if case.padding:
        bias = bias.masked_fill(~case.real_keys()[:, None, None], torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=case.dropout, scale=SCALE)


class Floor(Variant):
    """Plain attention without positions: the lower bound of the time.

    It attends to padding as well, because torch's fused kernels take no padding mask.
    """

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend

    def refusal(self, case: Case) -> str | None:
        """Refuse dropout on the CPU."""
        on_cpu = case.device == "cpu" and case.dropout
        return "torch's fused kernel has no dropout on the CPU" if on_cpu else None

    def _attend(self, case: Case, *x: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(
                *x[:3], dropout_p=case.dropout, scale=1 / math.sqrt(HEAD_SIZE)
            )


class DisentangledFlash(Variant):
    """PyPI ``disentangled-flash``: its training module with projected inputs."""

    def refusal(self, case: Case) -> str | None:
        """Refuse without the package or a GPU."""
        if importlib.util.find_spec("disentangled_flash") is None:
            return "disentangled-flash==1.1.1 is not installed"
        return None if case.device == "cuda" else "needs a CUDA device"

    def _attend(self, case: Case, *x: Tensor) -> Tensor:
        module = _disentangled_flash(case.heads, case.dropout, case.padding)
        module.projected = x
        hidden = x[0].new_empty(()).expand(case.batch, case.length, case.heads * HEAD_SIZE)
        output: Tensor = module(hidden, case.real_keys(), rel_embeddings=x[3])[0]
        return output.unflatten(-1, (case.heads, HEAD_SIZE)).transpose(1, 2)


@cache
def _disentangled_flash(heads: int, dropout: float, padding: bool) -> Any:
    from disentangled_flash import TritonTrainingDisentangledSelfAttention

    class Core(TritonTrainingDisentangledSelfAttention):  # type: ignore[misc]
        projected: tuple[Tensor, ...] = ()

        def _project_qkv(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
            return self.projected[:3]

        def _reshape_heads(self, tensor: Tensor, batch_size: int, sequence_length: int) -> Tensor:
            return tensor

        def _project_active_positions(
            self, rel_embeddings: Tensor, active_slots: Tensor
        ) -> tuple[Tensor, ...]:
            if active_slots.numel() == SLOTS:
                return self.projected[3:]
            return tuple(table.index_select(1, active_slots) for table in self.projected[3:])

    config = types.SimpleNamespace(
        hidden_size=heads * HEAD_SIZE,
        num_attention_heads=heads,
        attention_head_size=HEAD_SIZE,
        attention_probs_dropout_prob=dropout,
        hidden_dropout_prob=0.0,
        relative_attention=True,
        max_relative_positions=MAX_DISTANCE,
        position_buckets=BUCKETS,
        share_att_key=True,
        pos_att_type=["c2p", "p2c"],
    )
    return Core(config, assume_unpadded=not padding).train()


class FlashDeberta(Variant):
    """PyPI ``flashdeberta``: its operator, padded or packed as in its own model."""

    packed_from = 1024

    def refusal(self, case: Case) -> str | None:
        """Return the reason: the package or a GPU is missing, or dropout, which is unsupported."""
        if importlib.util.find_spec("flashdeberta") is None:
            return "flashdeberta==0.0.8 is not installed"
        if case.device != "cuda":
            return "needs a CUDA device"
        return "has no dropout of attention probabilities" if case.dropout else None

    def _attend(self, case: Case, *x: Tensor) -> Tensor:
        padded, packed = _flash_deberta()
        q, k, v, pos_key, pos_query = x
        tables = pos_key[None], pos_query[None]
        rest = (False, SCALE, BUCKETS, MAX_DISTANCE)
        real = case.real_keys() if case.padding else None
        if real is None or case.length < self.packed_from:
            lengths = None if real is None else real.sum(-1, dtype=torch.int32)
            output: Tensor = padded(q, k, v, lengths, *tables, *rest)
            return output
        lengths = real.sum(-1, dtype=torch.int32)
        longest = int(lengths.max())
        edges = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        rows = [t.transpose(1, 2)[real] for t in (q, k, v)]
        unpadded = packed(*rows, *tables, edges, edges, longest, longest, *rest)
        output = torch.zeros_like(q).transpose(1, 2)
        output = output.masked_scatter(real[..., None, None], unpadded)
        return output.transpose(1, 2)


@cache
def _flash_deberta() -> tuple[Any, Any]:
    """Import the two operators only: the models import names that transformers may lack."""
    if "flashdeberta" not in sys.modules:
        spec = importlib.util.find_spec("flashdeberta")
        assert spec is not None
        package = types.ModuleType("flashdeberta")
        package.__spec__ = spec
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["flashdeberta"] = package
    from flashdeberta.ops.flash_attention import flash_attention_with_disentangled
    from flashdeberta.ops.flash_attention_varlen import flash_attention_with_disentangled_varlen

    return flash_attention_with_disentangled, flash_attention_with_disentangled_varlen


EAGER, OURS, FLOOR = "transformers eager", ("triton", "native", "chunked"), "flash"
FLOORS = ("flash", "cudnn")
CPU_VARIANTS: dict[str, Variant] = {
    EAGER: Eager(),
    "SDPA with bias": Variant(sdpa_with_bias),
    "native": Ours("native"),
    "chunked": Ours("chunked"),
    "flash": Floor(SDPBackend.FLASH_ATTENTION),
}
GPU_VARIANTS: dict[str, Variant] = {
    "triton": Ours("triton"),
    "chunked": Ours("chunked"),
    "flash": Floor(SDPBackend.FLASH_ATTENTION),
    "cudnn": Floor(SDPBackend.CUDNN_ATTENTION),
    "DisentangledFlash": DisentangledFlash(),
    "FlashDeBERTa": FlashDeberta(),
    EAGER: Eager(),
}
