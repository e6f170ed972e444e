"""The profile of a step: all parts are found, forward and backward, and all labels are removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.step import parts
from megatron_deberta.config.schema import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model.attention import DisentangledSelfAttention
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.step import TrainStep

MODEL = ModelConfig(
    num_layers=3, hidden_size=32, num_heads=2, ffn_hidden_size=64, vocab_size=600,
    max_relative_positions=32, position_buckets=8, conv_kernel_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def profiled() -> dict[str, Any]:
    config = RunConfig(
        model=MODEL,
        parallel=ParallelConfig(engine="plain"),
        train=TrainConfig(global_batch_size=2, micro_batch_size=2),
    )
    groups = single_process_groups(torch.device("cpu"))
    model = build_model(config, groups)
    engine = build_engine(config, model.module.train(), model.specs, groups)
    step = TrainStep(engine, config, groups)
    ids = torch.randint(5, 600, (2, 64), generator=torch.Generator().manual_seed(1))
    picked = torch.arange(8).expand(2, 8)
    batch = Batch(ModelInputs(ids), picked, ids[:, :8], torch.arange(2))
    labels = parts.Labels(engine.module, engine)
    events, _ = parts.profile_steps(lambda: step(0, [batch]), 2, labels, on_gpu=False)
    whole = sum(e.cpu_time_total for e in events if e.name == "step") / 2e6
    # All operators, because the order of the largest depends on the machine.
    found = parts.time_by_part(events, 2, on_gpu=False, most=1000)
    return {"whole": whole, "engine": engine, **found}


def test_all_parts_are_found_and_add_up(profiled: dict[str, Any]) -> None:
    seconds = profiled["seconds"]
    expected = {*parts.PARTS.values(), parts.CORE, parts.OPTIMIZER, parts.ACCUMULATION, parts.HOST}
    assert seconds.keys() == expected  # One process: no communication.
    assert sum(seconds.values()) == pytest.approx(profiled["whole"], rel=0.02)
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)


def test_backward_belongs_to_the_part_of_its_forward(profiled: dict[str, Any]) -> None:
    found = profiled["operators"]
    assert {"_ChunkedAttentionBackward (backward)", "_NativeAttentionBackward (backward)"} & set(
        found["attention core"]
    )
    assert not any("(backward)" in name for name in found["optimizer"])
    for part in ("FFN", "attention projections", "mask decoder", "vocabulary head and loss"):
        assert any("(backward)" in name for name in found[part]), part
    assert "aten::mm (backward)" not in found[parts.HOST]
    assert "Python" in found[parts.HOST]
    assert not any(name.startswith("part: ") for names in found.values() for name in names)


def test_model_is_restored(profiled: dict[str, Any]) -> None:
    engine = profiled["engine"]
    assert "step" not in vars(engine)
    for module in engine.module.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        if isinstance(module, DisentangledSelfAttention):
            assert "_attend" not in vars(module)
