"""The attention operator compared with transformers' DisentangledSelfAttention, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from megatron_deberta.ops import RelativePositions, disentangled_attention
from tests.support.tolerances import FP32_MODULE

BATCH, LENGTH, HIDDEN, HEADS = 2, 45, 32, 4


def stock(shared: bool, buckets: int, terms: list[str]) -> DisentangledSelfAttention:
    torch.manual_seed(0)
    config = DebertaV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        relative_attention=True,
        max_relative_positions=24,
        position_buckets=buckets or -1,
        pos_att_type=terms,
        share_att_key=shared,
        norm_rel_ebd="none",
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    return DisentangledSelfAttention(config)


def heads(projected: Tensor) -> Tensor:
    return projected.unflatten(-1, (HEADS, -1)).transpose(-2, -3)


def project_and_attend(
    module: DisentangledSelfAttention, hidden: Tensor, table: Tensor, **options: str
) -> Tensor:
    """Apply the same projections around this package's operator."""
    projections = {"c2p": module.key_proj, "p2c": module.query_proj}
    if not module.share_att_key:
        names = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
        projections = {t: getattr(module, n) for t, n in names.items() if hasattr(module, n)}
    tables = [
        heads(projections[term](table)) if term in module.pos_att_type else None
        for term in ("c2p", "p2c")
    ]
    buckets = max(module.position_buckets, 0)
    output = disentangled_attention(
        heads(module.query_proj(hidden)),
        heads(module.key_proj(hidden)),
        heads(module.value_proj(hidden)),
        *tables,
        RelativePositions(module.max_relative_positions, buckets),
        attention_mask=real_tokens(),
        backend=options["backend"],
    )
    return output.transpose(1, 2).flatten(2)


def real_tokens() -> Tensor:
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 9]])


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("buckets", [0, 16], ids=["linear", "buckets"])
@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]], ids="-".join)
def test_operator_equals_transformers(
    backend: str, shared: bool, buckets: int, terms: list[str]
) -> None:
    module = stock(shared, buckets, terms)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
    table = torch.randn(2 * (buckets or 24), HIDDEN, requires_grad=True)
    real = real_tokens()
    mask = (real[:, None, :, None] & real[:, None, None, :]).expand(-1, -1, LENGTH, LENGTH)
    leaves = [hidden, table, *module.parameters()]

    results = []
    for output in (
        module(hidden, mask, rel_embeddings=table)[0],
        project_and_attend(module, hidden, table, backend=backend),
    ):
        kept = output * real[:, :, None]  # Outputs at padding are undefined.
        d_output = torch.randn(kept.shape, generator=torch.Generator().manual_seed(1))
        results.append([kept, *torch.autograd.grad(kept, leaves, d_output, allow_unused=True)])
    for expected, actual in zip(*results, strict=True):
        if expected is None:
            assert actual is None
            continue
        scale = expected.abs().max().clamp(min=1.0)
        torch.testing.assert_close(actual / scale, expected / scale, **FP32_MODULE)
