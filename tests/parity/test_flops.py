"""FLOP formulas compared with torch's counter on the model.

Both count matrix products and convolutions. The reference backend computes more than the formula
counts; the difference is added here.

"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.planning.ranks import reference_extra
from megatron_deberta.config.schema import ModelConfig, ObjectiveConfig, RunConfig
from megatron_deberta.data.batch import Batch, DecoderRows
from megatron_deberta.model import RuntimeOptions
from megatron_deberta.model.flops import forward_flops, recomputed_flops, training_flops_per_token
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import MaskedLanguageModel, build_objective
from tests.support.losses import PlainTokenLoss

ROWS, MASKED_SHARE = 2, 0.125
V2 = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=80,
    vocab_size=131,
    max_position_embeddings=64,
    max_relative_positions=16,
    position_buckets=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
CASES = {
    "1.5B-like": (replace(V2, conv_kernel_size=3), 64),
    "short rows": (replace(V2, conv_kernel_size=3), 8),
    "own position projections": (
        replace(V2, share_position_projections=False, position_buckets=0),
        32,
    ),
    "c2p": (replace(V2, position_terms="c2p"), 32),
    "p2c": (replace(V2, position_terms="p2c"), 32),
    "one decoder pass": (replace(V2, mask_decoder_passes=1), 32),
    "no decoder": (replace(V2, mask_decoder_passes=0, absolute_positions="none"), 32),
    "RoBERTa": (
        replace(V2, position_terms="none", mask_decoder_passes=0, absolute_positions="input"),
        32,
    ),
}


def reference_excess(model: ModelConfig, length: int) -> float:
    """Return the FLOPs per token that only the reference backend computes."""
    return sum(reference_extra(model, length, MASKED_SHARE))


def batch(length: int) -> Batch:
    generator = torch.Generator().manual_seed(length)
    masked = torch.arange(0, length, round(1 / MASKED_SHARE)).expand(ROWS, -1)
    return Batch(
        ModelInputs(torch.randint(5, 131, (ROWS, length), generator=generator)),
        masked_positions=masked,
        labels=torch.randint(5, 131, masked.shape, generator=generator),
        sample_index=torch.arange(ROWS),
    )


def counted(model: ModelConfig, length: int, recompute: Any) -> tuple[float, float]:
    """Return the FLOPs per token of forward, and of forward and backward, by torch's counter."""
    module = MaskedLanguageModel(model, RuntimeOptions(recompute, "reference")).train()
    # The model's own loss computes gradients in forward, partly in place, which is not counted.
    module.token_loss = PlainTokenLoss()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    with FlopCounterMode(display=False) as counter:
        loss = module(batch(length)).losses["masked"].loss
        forward = counter.get_total_flops()
        loss.backward()
    return forward / (ROWS * length), counter.get_total_flops() / (ROWS * length)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name: str) -> None:
    model, length = CASES[name]
    excess = reference_excess(model, length)
    forward, training = counted(model, length, "none")
    formula = forward_flops(model, length, ROWS, MASKED_SHARE).total
    assert forward == pytest.approx(formula + excess, rel=1e-12)
    formula = training_flops_per_token(model, length, ROWS, MASKED_SHARE)
    assert training == pytest.approx(formula + 3 * excess, rel=1e-12)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", ["c2p", "RoBERTa"])
def test_decoder_and_pooled_states(name: str, pooling: Any) -> None:
    """The formula for RetroMAE's decoder and pooling equals the counted operations."""
    model, length = CASES[name]
    masking = ObjectiveConfig(
        name="retromae", mask_probability=MASKED_SHARE, retromae_pooling=pooling
    )
    objective = build_objective(RunConfig(model=model, objective=masking))
    module = objective.build_model(RuntimeOptions("none", "reference")).train()
    module.token_loss = PlainTokenLoss()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    rows, places = batch(length), torch.arange(0, length, 2).expand(ROWS, -1)
    rows = replace(rows, decoder=DecoderRows(rows.inputs.input_ids, places, places))
    with FlopCounterMode(display=False) as counter:
        losses = module(rows).losses
        (losses["masked"].loss + losses["reconstruction"].loss).backward()
    counted_flops = counter.get_total_flops() / (ROWS * length)
    assert counted_flops == pytest.approx(objective.training_flops(length, ROWS), rel=1e-12)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["1.5B-like", "own position projections", "RoBERTa"])
def test_recomputation(name: str, recompute: Any) -> None:
    model, length = CASES[name]
    again = counted(model, length, recompute)[1] - counted(model, length, "none")[1]
    formula = recomputed_flops(model, length, ROWS, recompute)
    assert again == pytest.approx(formula, rel=1e-12)
