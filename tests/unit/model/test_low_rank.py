"""Low-rank adapters against the merged weights of their definition, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import Head, ModelConfig, RunConfig
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.model.low_rank import (
    FIRST,
    SECOND,
    adapter_shapes,
    is_adapter,
    is_trained,
)
from megatron_deberta.model.task_models import parameter_shapes
from megatron_deberta.objectives.labelled import TaskModel
from tests.support.labelled import SMALL, labelled_run, labelled_steps
from tests.support.tolerances import FP64

GROUPS = single_process_groups(torch.device("cpu"))
SEPARATE = replace(SMALL, share_position_projections=False)


def loss_of(model: nn.Module, batch: TaskBatch) -> Tensor:
    # The objective's loss is fp32.
    assert isinstance(model, TaskModel)
    return model.logits(batch.inputs).square().sum()


def adapted(run: RunConfig) -> nn.Module:
    """Return the model of a run, its adapters and head with random weights."""
    model = build_model(run, GROUPS, torch.float64).module
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return model


@pytest.mark.parametrize(
    ("head", "base", "targets"),
    [
        ("classification", SMALL, ("query", "key", "value", "output", "up", "down")),
        ("tokens", SMALL, ("value", "down")),
        ("spans", SEPARATE, ("query", "output")),
        ("regression", SMALL, ("key", "up")),
    ],
)
def test_equal_to_merged_weights(head: Head, base: ModelConfig, targets: tuple[str, ...]) -> None:
    """Logits and gradients equal those of a model with the adapters added to its weights."""
    run = labelled_run(head, model=base, lora_rank=3, lora_targets=targets)
    batch = next(labelled_steps(run, GROUPS))[0]
    model = adapted(run)
    merged = build_model(labelled_run(head, model=base), GROUPS, torch.float64).module
    found, scale = dict(model.named_parameters()), run.finetune.lora_alpha / 3
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(found[name])
            layer = name.removesuffix(".weight")
            if layer + FIRST in found:
                parameter += scale * found[layer + SECOND] @ found[layer + FIRST]
    ours, theirs = loss_of(model, batch), loss_of(merged, batch)
    torch.testing.assert_close(ours, theirs, **FP64)
    ours.backward()
    theirs.backward()
    whole = {name: parameter.grad for name, parameter in merged.named_parameters()}
    num_adapters = 0
    for name, parameter in found.items():
        if name.endswith(FIRST):
            num_adapters += 1
            layer = name.removesuffix(FIRST)
            gradient, second = whole[layer + ".weight"], found[layer + SECOND]
            assert gradient is not None
            torch.testing.assert_close(parameter.grad, scale * second.T @ gradient, **FP64)
            torch.testing.assert_close(second.grad, scale * gradient @ parameter.T, **FP64)
        elif is_adapter(name):
            continue
        elif is_trained(name, 3):
            torch.testing.assert_close(parameter.grad, whole[name], **FP64)
        else:
            assert parameter.grad is None
            assert not parameter.requires_grad
    assert num_adapters == 2 * len(targets)


def test_the_run_starts_at_the_weights_without_adapters() -> None:
    """B starts at 0 and A is uniform, so the first loss is that without adapters."""
    run = labelled_run("classification", lora_rank=4)
    batch = next(labelled_steps(run, GROUPS))[0]
    model, plain = (
        build_model(each, GROUPS).module for each in (run, labelled_run("classification"))
    )
    assert loss_of(model, batch).equal(loss_of(plain, batch))
    for name, parameter in model.named_parameters():
        if name.endswith(SECOND):
            assert not parameter.any()
        elif name.endswith(FIRST):
            limit = 1 / math.sqrt(parameter.size(1))
            assert 0.8 * limit < parameter.abs().max() <= limit
            assert parameter.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.15)


def test_shapes_of_adapters() -> None:
    run = labelled_run("classification", lora_rank=4)
    model = build_model(run, GROUPS).module
    found = {name: tuple(p.shape) for name, p in model.named_parameters() if is_adapter(name)}
    assert adapter_shapes(parameter_shapes(run.model), run.finetune) == found
    assert found["encoder.layers.1.ffn.down.lora.A"] == (4, 64)
    assert found["encoder.layers.1.ffn.down.lora.B"] == (32, 4)
