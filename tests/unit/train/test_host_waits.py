"""No micro batch makes the host wait for the device, or depends on a number of the host's.

A CPU cannot be waited for, so forward and backward run on the meta device, whose tensors have no
values: whatever needs one (``item``, ``nonzero``, an index by booleans, a branch) fails.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_deberta.config.schema import (
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.preemption import STOP_FILE, Request, Requests, SignalRecorder
from megatron_deberta.train.setup import DTYPES
from megatron_deberta.train.step import TrainStep
from tests.support.tiny_models import V2

MODEL = replace(V2, num_layers=2, conv_kernel_size=3)


def fake_batch(
    device: torch.device, documents: bool, padded: bool = True
) -> tuple[Batch, DropoutSeeds]:
    zeros = torch.zeros(2, 16, dtype=torch.int64, device=device)
    inputs = ModelInputs(zeros, zeros.bool() if padded else None)
    if documents:
        inputs = replace(inputs, document_ids=zeros, position_ids=zeros)
    masked_positions = zeros[:, :3] + torch.arange(3, device=device)
    batch = Batch(inputs, masked_positions, zeros[:, :3], sample_index=zeros[:, 0])
    return batch, DropoutSeeds(1, zeros[0, 0], zeros[:, 0])


@pytest.mark.parametrize("documents", [False, True], ids=["row", "documents"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_micro_batch_never_waits(recompute: Any, documents: bool) -> None:
    groups = replace(single_process_groups(torch.device("cpu")), device=torch.device("meta"))
    parallel = ParallelConfig(recompute=recompute, attention_backend="chunked")
    module = build_model(RunConfig(model=MODEL, parallel=parallel), groups, torch.bfloat16).module
    loss = module.train()(*fake_batch(groups.device, documents)).losses["masked"].loss
    (loss / 3).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    # What the test would see:
    with pytest.raises(RuntimeError, match="meta"):
        float(loss)
    with pytest.raises(NotImplementedError):
        loss.nonzero()


class Operators(TorchDispatchMode):
    """Counts dispatched operators; ``item``, ``float`` and ``bool`` are ``_local_scalar_dense``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "stage"),
    [("fp32", 0), ("fp32", 1), ("bf16", 1), ("bf16", 2), ("fp16", 2), ("fp16", 3)],
)
def test_a_step_waits_once(
    dtype: Any, stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its losses, requests and gradient norm together; norms are not computed one by one."""
    groups = single_process_groups(torch.device("cpu"))
    config = RunConfig(
        model=MODEL,
        parallel=ParallelConfig(zero_stage=stage, attention_backend="chunked"),
        precision=PrecisionConfig(dtype=dtype),
        train=TrainConfig(steps=9, micro_batch_size=2, global_batch_size=4),
    )
    model = build_model(config, groups, DTYPES[dtype])
    requests = Requests(SignalRecorder(), str(tmp_path), groups)
    engine = build_engine(config, model.module, model.specs, groups)
    step = TrainStep(engine, config, groups, requests=requests)
    batches = [fake_batch(groups.device, False, padded=False)[0]] * 2
    update, operators, lists = engine.step, Operators(), []

    def counted(*args: Any) -> Any:
        # Before the update, the values of arguments are checked on CPU only.
        with operators:
            return update(*args)

    monkeypatch.setattr(engine, "step", counted)
    monkeypatch.setattr(torch.Tensor, "tolist", spy(torch.Tensor.tolist, lists))
    for number in range(3):
        lists.clear()
        (tmp_path / STOP_FILE).touch()
        requests.look_for_files()
        operators.counts.clear()
        step(number, batches)
        assert requests.poll() == Request(stop=True)
        assert len(lists) == 1, number
        assert operators.counts["_local_scalar_dense"] == 0, number
        if stage:
            assert operators.counts["linalg_vector_norm"] <= 2, "of groups, not of parameters"
    engine.destroy()


def spy(function: Any, calls: list[Any]) -> Any:
    def called(tensor: torch.Tensor) -> Any:
        calls.append(tensor)
        return function(tensor)

    return called
