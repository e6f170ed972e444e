from __future__ import annotations

import random
import re

import pytest
import torch

from megatron_deberta.config.schema import PrecisionConfig
from megatron_deberta.engine.deepspeed_patches import import_deepspeed
from megatron_deberta.engine.schedule import HYSTERESIS, DynamicLossScale
from megatron_deberta.errors import NumericsError

FP16 = PrecisionConfig(dtype="fp16", initial_loss_scale_power=10, loss_scale_window=3)


@pytest.mark.parametrize("seed", range(5))
def test_scale_moves_by_deepspeeds_rules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
    theirs = loss_scaler.DynamicLossScaler(
        init_scale=2.0**10,
        scale_window=FP16.loss_scale_window,
        min_scale=FP16.min_loss_scale,
        delayed_shift=HYSTERESIS,
        consecutive_hysteresis=False,
    )
    ours = DynamicLossScale(FP16)
    drawn = random.Random(seed)
    for _ in range(200):
        overflow = drawn.random() < 0.2
        theirs.update_scale(overflow)
        ours.update(overflow)
        assert ours.scale == theirs.cur_scale


def test_overflow_at_the_smallest_scale_names_the_key() -> None:
    scale = DynamicLossScale(
        PrecisionConfig(dtype="fp16", initial_loss_scale_power=0, min_loss_scale=1.0)
    )
    scale.update(overflow=True)
    with pytest.raises(NumericsError, match=re.escape("precision.min_loss_scale=1")):
        scale.update(overflow=True)


def test_continued_scale_moves_as_the_unbroken_one() -> None:
    outcomes = [False, True, False, False, True, True, False, False, False, False, True, False]
    unbroken = DynamicLossScale(FP16)
    for overflow in outcomes[:5]:
        unbroken.update(overflow)
    continued = DynamicLossScale(FP16)
    continued.load_state_dict(unbroken.state_dict())
    for overflow in outcomes[5:]:
        unbroken.update(overflow)
        continued.update(overflow)
        assert continued.state_dict() == unbroken.state_dict()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_formats_have_no_scale(dtype: str) -> None:
    scale = DynamicLossScale(PrecisionConfig(dtype=dtype))  # type: ignore[arg-type]
    fp16 = DynamicLossScale(FP16).state_dict()
    for overflow in (True, True, False):
        scale.update(overflow)
    scale.load_state_dict(fp16)
    assert scale.scale == 1.0
