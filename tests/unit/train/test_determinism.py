"""What makes a run repeat its bits is set before anything is computed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.step.operators import count_pass
from megatron_deberta.config import config_from_dict
from megatron_deberta.distributed.environment import RankEnvironment
from megatron_deberta.errors import ConfigError
from megatron_deberta.model.fused import compiled
from megatron_deberta.train.setup import set_determinism
from tests.support.labelled import SMALL

ALONE = RankEnvironment("none", 0, 1, 0, 1, "127.0.0.1", 12000)


@pytest.fixture(autouse=True)
def _own_process_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = True
    # Removed again afterwards, too, where they were not set before.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)
    for backend, value in zip(backends, before, strict=True):
        backend.allow_tf32 = value


def test_cpu_refuses_what_does_not_repeat() -> None:
    set_determinism(torch.device("cpu"), ALONE)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_the_compiler_repeats_too() -> None:
    from torch._inductor import config

    set_determinism(torch.device("cpu"), ALONE)
    compiled(lambda x: x)
    assert config.deterministic
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("chosen", ["", ":16:8"])
def test_cuda_warns_of_it_and_fixes_cublas(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Removed again afterwards, too, where it was not set before.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen)
    if not chosen:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_determinism(torch.device("cuda"), ALONE)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (chosen or ":4096:8")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fp32_is_not_tf32(device: str) -> None:
    set_determinism(torch.device(device), ALONE)
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("chosen", ["", "max_split_size_mb:128"])
def test_segments_of_cuda_memory_grow(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if chosen:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", chosen)
    set_determinism(torch.device("cpu"), ALONE)
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") == chosen
    set_determinism(torch.device("cuda"), ALONE)
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == (chosen or "expandable_segments:True")


def test_no_operator_of_a_step_on_a_gpu_adds_in_an_order_of_its_own() -> None:
    """Such operators either sort and wait for the device on CUDA or do not repeat."""
    operators = count_pass(replace(SMALL, conv_kernel_size=3), 2)
    names = {name.split("::")[1] for counts in operators.values() for name in counts}
    assert "embedding" in names
    assert not {name for name in names if re.match("scatter|index_add|index_put|put_|cumsum", name)}


@pytest.mark.parametrize(("device", "is_zero"), [("cpu", True), ("cuda", False)])
def test_a_cpu_takes_denormal_numbers_as_zero_in_all_threads(device: str, is_zero: bool) -> None:
    def count_of_new_threads() -> int:
        set_determinism(torch.device(device), ALONE)
        # Large enough to be divided among all threads.
        product = torch.full((1 << 20,), 1e-39) * torch.full((1 << 20,), 0.5)
        return int(product.view(torch.int32).count_nonzero())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # A thread has an OpenMP team of its own, which starts here.
        with ThreadPoolExecutor(1) as pool:
            nonzero = pool.submit(count_of_new_threads).result()
    finally:
        torch.set_num_threads(before)
    assert nonzero == (0 if is_zero else 1 << 20)


def test_zero_is_no_positive_number_where_denormal_numbers_are_zero() -> None:
    set_determinism(torch.device("cpu"), ALONE)
    with pytest.raises(ConfigError, match=r"train\.steps=0 .*above 0"):
        config_from_dict({"train": {"steps": 0}}, "run.yaml")
