"""No micro batch makes the host wait for the device, or depends on a number of the host's.

A CPU cannot be waited for, so forward and backward run on the meta device, whose tensors have no
values: whatever needs one (``item``, ``nonzero``, an index by booleans, a branch) fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_deberta.config.schema import ModelConfig, ParallelConfig, RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.model import DropoutSeeds

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    ffn_hidden_size=64,
    vocab_size=131,
    max_position_embeddings=32,
    max_relative_positions=16,
    position_buckets=4,
    conv_kernel_size=3,
)


def fake_batch(device: torch.device, documents: bool) -> tuple[Batch, DropoutSeeds]:
    zeros = torch.zeros(2, 16, dtype=torch.int64, device=device)
    batch = Batch(zeros, zeros.bool(), zeros[:, :3], zeros[:, :3], sample_index=zeros[:, 0])
    if documents:
        batch = replace(batch, document_ids=zeros, position_ids=zeros)
    return batch, DropoutSeeds(1, zeros[0, 0], zeros[:, 0])


@pytest.mark.parametrize("documents", [False, True], ids=["row", "documents"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_micro_batch_never_waits(recompute: Any, documents: bool) -> None:
    groups = replace(single_process_groups(torch.device("cpu")), device=torch.device("meta"))
    parallel = ParallelConfig(recompute=recompute, attention_backend="chunked")
    module = build_model(RunConfig(model=MODEL, parallel=parallel), groups, torch.bfloat16).module
    loss, _ = module.train()(*fake_batch(groups.device, documents))
    (loss / 3).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    # What the test would see:
    with pytest.raises(RuntimeError, match="meta"):
        float(loss)
    with pytest.raises(NotImplementedError):
        loss.nonzero()
