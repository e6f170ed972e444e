"""Construction of a rank's part: values, memory, errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.lib.measuring import peak_resident_bytes
from megatron_deberta.config.schema import ModelConfig, ParallelConfig, RunConfig
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.parallelize.apply import row_parallel
from megatron_deberta.distributed.parallelize.plan import VOCABULARY_MULTIPLE, shard_spec
from megatron_deberta.distributed.topology import ProcessGroups, single_process_groups
from megatron_deberta.errors import TopologyError
from megatron_deberta.model import DebertaForMaskedLM
from tests.support.ranks import run_ranks
from tests.support.tiny_models import V2

CPU = torch.device("cpu")
SMALL = replace(V2, num_layers=2, vocab_size=200, conv_kernel_size=3)


def layout(tp_rank: int, tp_size: int) -> ProcessGroups:
    """Groups of a rank without processes; building does not communicate."""
    return replace(single_process_groups(CPU), tp_rank=tp_rank, tp_size=tp_size)


def run(model: ModelConfig, tp_size: int = 1) -> RunConfig:
    return RunConfig(model=model, parallel=ParallelConfig(tensor_parallel_size=tp_size))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_parts_join_to_the_same_model(tp_size: int) -> None:
    whole = build_model(run(SMALL), layout(0, 1))
    parts = [build_model(run(SMALL, tp_size), layout(rank, tp_size)) for rank in range(tp_size)]
    for name, parameter in whole.module.named_parameters():
        expected = whole.specs[name].true_part(parameter)
        held = [part.specs[name].true_part(part.module.get_parameter(name)) for part in parts]
        dim = parts[0].specs[name].dim
        joined = held[0] if dim is None else torch.cat(held, dim)
        assert torch.equal(joined, expected), name


def test_vocabulary_is_padded_with_zeros() -> None:
    part = build_model(run(SMALL, 2), layout(1, 2))
    spec = part.specs["embeddings.token.weight"]
    assert spec.local_shape[0] % VOCABULARY_MULTIPLE == 0
    assert (spec.offset, spec.length) == (128, 72)
    assert not part.module.get_parameter(spec.name)[spec.length :].any()


def test_vocabulary_smaller_than_the_ranks() -> None:
    """A rank may hold padding only."""
    spec = shard_spec("embeddings.token.weight", (70, 8), 3, 4)
    assert (spec.offset, spec.length, spec.local_shape) == (70, 0, (64, 8))


def test_every_parameter_is_filled_and_on_the_device() -> None:
    for parameter in build_model(run(SMALL), layout(0, 1)).module.parameters():
        assert parameter.device == CPU


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(TopologyError, match=r"tensor_parallel_size=3.*num_heads=4.*\[1, 2, 4\]"):
        build_model(run(SMALL, 3), layout(0, 3))


def test_width_that_does_not_divide() -> None:
    odd = replace(SMALL, ffn_hidden_size=66)
    with pytest.raises(TopologyError, match=r"tensor_parallel_size=4 .*ffn\.up.*66"):
        build_model(run(odd, 4), layout(0, 4))


LARGE = ModelConfig(
    num_layers=4, hidden_size=1024, num_heads=16, ffn_hidden_size=4096, vocab_size=64000
)


def peak_growth(rank: int, tp_size: int) -> tuple[int, int]:
    """Bytes of a rank's part, and the increase of the process's peak memory."""
    build_model(run(SMALL), layout(0, 1))  # imports and allocators are warm
    before = peak_resident_bytes()
    model = build_model(run(LARGE, tp_size), layout(tp_size - 1, tp_size))
    growth = peak_resident_bytes() - before
    held = sum(math.prod(spec.local_shape) * 4 for spec in model.specs.values())
    return held, growth


def test_the_whole_never_exists_on_a_rank() -> None:
    answer: Any = run_ranks(peak_growth, 1, 4, start_distributed=False)
    held, growth = answer[0]
    whole = 4 * held
    assert growth < held + 120e6 < whole


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_row_parallel_without_a_group_is_linear(sequence: bool, with_bias: bool) -> None:
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    bias = torch.randn(5) if with_bias else None
    y = row_parallel(x, weight, bias, None, sequence=sequence)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_parameters_of_the_model_itself(tp_size: int) -> None:
    """A model of one's own may have parameters beside its modules."""

    class Scaled(DebertaForMaskedLM):
        def build_heads(self, config: ModelConfig) -> None:
            super().build_heads(config)
            self.scale = torch.nn.Parameter(torch.empty(1))

    model = build_model(run(SMALL, tp_size), layout(0, tp_size), model_class=Scaled)
    assert model.module.get_parameter("scale").device == CPU
    assert model.specs["scale"].logical_shape == (1,)
    with pytest.raises(TopologyError, match=r"scale has no dimension.*\(1,\)"):
        shard_spec("scale", (), 0, tp_size)
