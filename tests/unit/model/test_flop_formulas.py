"""FLOP formulas against figures derived by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.flops import forward_flops, training_flops_per_token

XXLARGE = load_config(Path(__file__).parents[3] / "configs/models/1.5b.yaml").model


def test_the_1_5b_model() -> None:
    flops = forward_flops(XXLARGE, 512, 32)
    assert flops.layers == pytest.approx(2957e6, rel=1e-3)
    assert flops.mask_decoder == pytest.approx(25.5e6, rel=1e-3)
    assert flops.head == pytest.approx(59.7e6, rel=1e-3)
    assert flops.convolution == pytest.approx(14.2e6, rel=5e-3)
    assert flops.total - flops.position_projections == pytest.approx(3056e6, rel=1e-3)
    trained = training_flops_per_token(XXLARGE, 512, 1_000_000)
    assert trained == pytest.approx(9.17e9, rel=1e-3)
    trained = training_flops_per_token(XXLARGE, 2048, 1_000_000)
    assert trained == pytest.approx(10.5e9, rel=2e-3)


def test_position_projections_are_shared_by_the_micro_batch() -> None:
    one, many = forward_flops(XXLARGE, 512, 1), forward_flops(XXLARGE, 512, 32)
    # 48 layers x 2 terms x a product of [512, 1536] by [1536, 1536].
    assert one.position_projections * 512 == 48 * 2 * 2 * 512 * 1536 * 1536
    assert one.position_projections == 32 * many.position_projections


def test_plain_encoder_has_the_textbook_count() -> None:
    plain = ModelConfig(position_terms="none", mask_decoder_passes=0, absolute_positions="input")
    flops = forward_flops(plain, 512, 8)
    # 12 x (24 d^2 + 4 N d), the textbook count.
    assert flops.layers == 12 * (24 * 768 * 768 + 4 * 512 * 768)
    assert flops.position_projections == flops.convolution == flops.mask_decoder == 0


def test_each_position_term_costs_the_same() -> None:
    totals = [
        forward_flops(replace(XXLARGE, position_terms=terms), 512, 8).total
        for terms in ("none", "c2p", "p2c", "c2p+p2c")
    ]
    assert totals[1] == totals[2]
    assert totals[3] - totals[2] == pytest.approx(totals[1] - totals[0])
    assert totals[0] < totals[1]
