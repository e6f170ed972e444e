"""DeepSpeed's configuration, and engines in one process without a launcher, compiler or ninja."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_deberta.config.schema import ParallelConfig, PrecisionConfig, RunConfig, TrainConfig
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import ProcessGroups, single_process_groups
from megatron_deberta.engine import deepspeed_engine, deepspeed_patches
from megatron_deberta.engine.deepspeed_engine import deepspeed_config
from megatron_deberta.engine.deepspeed_patches import (
    deepspeed_environment,
    end_single_process,
    model_parallel_unit,
    overlapped_reduction,
    start_single_process,
)
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import ConfigError
from tests.support.toy_engine import (
    assert_same_states,
    build_toy,
    micro_batch,
    start,
    states,
    toy_config,
    toy_specs,
    train,
)

GROUPS = single_process_groups(torch.device("cpu"))
ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys, torch
from tests.support.toy_engine import start, toy_config, train
from megatron_deberta.distributed.topology import single_process_groups
for dtype, stage in (("fp32", 0), ("bf16", 1), ("fp16", 2), ("bf16", 3)):
    groups = single_process_groups(torch.device("cpu"))
    config = toy_config("deepspeed", dtype, stage)
    engine = start(config, groups)
    train(engine, config, groups, range(2))
    engine.destroy()
import megatron_deberta.finetune.settings  # as plan and finetune do
slow = {"torch._inductor.compile_fx", "transformers.modeling_utils"}
print("done", *slow & set(sys.modules))
"""


@pytest.mark.slow
def test_it_runs_with_nothing_in_its_environment_and_says_nothing(tmp_path: Path) -> None:
    # Nor does it import the compiler or transformers' models, each of which takes seconds.
    bare = {"PYTHONPATH": str(ROOT), "PATH": str(tmp_path), "HOME": str(tmp_path)}
    bare["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=bare, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def trained(config: RunConfig, steps: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the history of some steps, and the states after them."""
    engine = start(config, GROUPS)
    found = train(engine, config, GROUPS, range(steps)), states(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_never_synchronizes(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timers would, from the third step on."""
    config = toy_config("deepspeed", "fp32", stage)
    engine = start(config, GROUPS)
    from deepspeed.accelerator import get_accelerator

    calls = []
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda *_: calls.append(1))
    train(engine, config, GROUPS, range(4))
    found = list(calls)
    engine.destroy()
    assert not found


@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 1), ("bf16", 1), ("fp16", 2), ("fp16", 3)])
def test_clipping_inside_adam_gives_the_same_updates(
    dtype: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; every gradient is clipped, and unscaled in fp16."""
    config, found = toy_config("deepspeed", dtype, stage, clip=0.05), []
    for folds in (False, True):
        monkeypatch.setattr(deepspeed_patches, "can_fold", lambda *_, folds=folds: folds)
        history, after = trained(config, 3)
        assert all(outcome.grad_norm > 0.05 for outcome, _ in history)
        found.append(after)
    assert_same_states(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_norms_are_deepspeeds_in_one_call_per_group(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, compared = toy_config("deepspeed", "fp16", stage), []
    engine: Any = start(config, GROUPS)
    optimizer = engine._engine.optimizer
    make, calls = deepspeed_patches._group_norm_function, []
    foreach_norm = torch._foreach_norm

    def compare(*args: Any, **options: Any) -> Any:
        norm_of = make(*args, **options)

        def both(gradients: Any, params: Any) -> torch.Tensor:
            gradients = list(gradients)
            found = norm_of(gradients, params)
            compared.append(
                (found, type(optimizer).get_grad_norm_direct(optimizer, gradients, params))
            )
            return found

        return both

    monkeypatch.setattr(deepspeed_patches, "_group_norm_function", compare)
    monkeypatch.setattr(
        torch, "_foreach_norm", lambda *x, **y: (calls.append(1), foreach_norm(*x, **y))[1]
    )
    train(engine, config, GROUPS, range(2))
    engine.destroy()
    assert compared
    assert len(calls) == len(compared)
    for found, expected in compared:
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


class Conversions(TorchDispatchMode):
    """Dispatch mode that counts conversions of 16-bit tensors to fp32, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[torch.Size] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16:
            self.shapes[out.shape] += out.dtype == torch.float32
        return out


@pytest.mark.parametrize(
    ("dp_size", "name", "expected"),
    [(1, "BF16_Optimizer", (0, 6)), (2, "DeepSpeedZeroOptimizer", (2, 6))],
)
def test_bf16_gradients_are_not_converted_before_they_are_added(
    monkeypatch: pytest.MonkeyPatch, dp_size: int, name: str, expected: tuple[int, int]
) -> None:
    """With the optimizers of one and of several data-parallel ranks; the sums keep their bits.

    Of the second, sums begin as a conversion.
    """

    def select(groups: ProcessGroups) -> AbstractContextManager[None]:
        return overlapped_reduction(dataclasses.replace(groups, dp_size=dp_size))

    monkeypatch.setattr(deepspeed_engine, "overlapped_reduction", select)
    results, counts = [], []
    for directly in (True, False):
        with monkeypatch.context() as patch:
            if not directly:
                patch.setattr(deepspeed_engine, "add_gradients_directly", lambda optimizer: None)
            config = toy_config("deepspeed", "bf16", 1)
            config = dataclasses.replace(
                config, train=dataclasses.replace(config.train, global_batch_size=6)
            )
            engine = start(config, GROUPS)
        assert type(engine._engine.optimizer).__name__ == name  # type: ignore[attr-defined]
        weight = engine._trainable["layers.0.up.weight"].shape
        history = []
        for step in range(3):
            with Conversions() as conversions:
                for at in range(3):
                    engine.backward(engine.module(micro_batch(3 * step + at, 0, GROUPS)) / 3)
            counts.append(conversions.shapes[weight])
            history.append(engine.step(1e-2).grad_norm)
        results.append((history, states(engine)))
        engine.destroy()
    # Two layers have a weight of this shape.
    assert counts == [expected[0]] * 3 + [expected[1]] * 3
    assert results[0][0] == results[1][0]
    assert_same_states(results[0][1], results[1][1], rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_without_bias_correction_it_equals_the_reference_engine(dtype: str, stage: int) -> None:
    results = [
        trained(toy_config(name, dtype, stage, bias_correction=False, clip=0.0), 4)[1]
        for name in ("deepspeed", "plain")
    ]
    assert_same_states(*results)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_gives_the_same_updates(stage: int) -> None:
    results = []
    for offload in (False, True):
        config = toy_config("deepspeed", "bf16", stage)
        parallel = dataclasses.replace(config.parallel, offload_optimizer=offload)
        results.append(trained(dataclasses.replace(config, parallel=parallel), 3)[1])
    assert_same_states(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_validation_between_steps_changes_nothing(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_engine, "PERSISTENCE_THRESHOLD", 0)
    results = []
    for validate in (False, True):
        config = toy_config("deepspeed", "fp32", stage)
        engine = start(config, GROUPS)
        history = []
        for step in range(4):
            history += train(engine, config, GROUPS, range(step, step + 1))
            if validate:
                engine.module.eval()
                with torch.no_grad():
                    engine.module(micro_batch(50, 0, GROUPS))
                engine.module.train()
        results.append(history)
        engine.destroy()
    assert results[0] == results[1]


@pytest.mark.parametrize(("name", "stage"), [("plain", 1), *(("deepspeed", s) for s in range(4))])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(name: str, stage: int) -> None:
    config = toy_config(name, "fp32", stage)
    engine = start(config, GROUPS)
    train(engine, config, GROUPS, range(1))
    before, scalars = states(engine), engine.state_dict()
    outcome, _ = train(engine, config, GROUPS, range(1, 2), {1: math.inf})[0]
    assert (outcome.skipped, outcome.grad_norm) == (True, math.inf)
    assert_same_states(states(engine), before)
    assert engine.state_dict() == scalars
    assert not train(engine, config, GROUPS, range(2, 3))[0][0].skipped
    engine.destroy()


def test_the_wrong_number_of_micro_batches_is_an_error() -> None:
    engine = start(toy_config("deepspeed"), GROUPS)
    engine.backward(engine.module(micro_batch(0, 0, GROUPS)))
    with pytest.raises(RuntimeError, match="1 losses accumulated, 2 expected"):
        engine.step(0.1)
    engine.backward(engine.module(micro_batch(0, 1, GROUPS)))
    with pytest.raises(RuntimeError, match=r"step\(\) is due after 2 losses"):
        engine.backward(engine.module(micro_batch(0, 1, GROUPS)))
    engine.destroy()


def test_deepspeed_is_not_told_of_a_sequence_parallelism_of_its_own() -> None:
    # With this method it would ignore the tensor- and data-parallel groups.
    start_single_process(GROUPS)
    unit = model_parallel_unit(GROUPS)
    end_single_process(GROUPS)
    assert not hasattr(unit, "initialize_sequence_parallel")
    assert unit.get_data_parallel_world_size() == unit.get_model_parallel_world_size() == 1


@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 0), ("fp16", 1), ("fp16", 2), ("fp32", 3)])
def test_an_engine_leaves_nothing_behind_and_others_follow(
    dtype: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    environment, variables, histories = read_environment(), dict(os.environ), []
    for _ in range(2):
        config, module = toy_config("deepspeed", dtype, stage), build_toy(GROUPS, dtype)
        engine = build_engine(config, module, toy_specs(module), GROUPS)
        assert dist.is_initialized()
        # Only while DeepSpeed starts is fp16 allowed on CPU.
        from deepspeed.accelerator import get_accelerator

        assert "is_fp16_supported" not in vars(get_accelerator())
        histories.append(train(engine, config, GROUPS, range(2)))
        engine.destroy()
        assert not dist.is_initialized()
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert dict(os.environ) == variables
        assert read_environment() == environment
    assert histories[0] == histories[1]
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    start(toy_config("deepspeed", "fp32", stage), GROUPS).destroy()
    assert os.environ["LOCAL_RANK"] == "0"


def test_local_rank_is_the_gpus_not_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    only_gpu = dataclasses.replace(GROUPS, device=torch.device("cuda", 0))
    with deepspeed_environment(only_gpu):
        assert os.environ["LOCAL_RANK"] == "0"
        assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ
    assert os.environ["LOCAL_RANK"] == "3"
    assert os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "3"


TRAIN = TrainConfig(global_batch_size=48, micro_batch_size=4)


def _settings(dtype: Any = "auto", **parallel: Any) -> dict[str, Any]:
    config = RunConfig(
        parallel=ParallelConfig(**parallel), precision=PrecisionConfig(dtype=dtype), train=TRAIN
    )
    return deepspeed_config(config, 3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stage_0_in_16_bits_is_refused_by_name(dtype: Any) -> None:
    config = RunConfig(
        parallel=ParallelConfig(zero_stage=0), precision=PrecisionConfig(dtype=dtype), train=TRAIN
    )
    match = f"parallel.zero_stage=0.*precision.dtype={dtype}.*parallel.zero_stage=1"
    with pytest.raises(ConfigError, match=match):
        deepspeed_config(config, 1)
    groups = single_process_groups(torch.device("cpu"))
    with pytest.raises(ConfigError, match=match):
        build_engine(config, torch.nn.Linear(1, 1), {}, groups)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_gradients_are_accumulated_and_reduced_in_fp32(dtype: str, stage: int) -> None:
    settings = _settings(dtype=dtype, zero_stage=stage)
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["communication_data_type"] == "fp32"
    assert settings["zero_optimization"]["stage"] == stage
    assert settings["gradient_accumulation_steps"] == 4
    assert ("bf16" in settings, "fp16" in settings) == (dtype == "bf16", dtype == "fp16")


def test_stage_3_leaves_torch_alone_and_offload_is_passed_on() -> None:
    zero = _settings(zero_stage=3)["zero_optimization"]
    assert not zero["memory_efficient_linear"]
    assert not zero["override_module_apply"]
    assert "offload_optimizer" not in zero
    zero = _settings(zero_stage=2, offload_optimizer=True)["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == "cpu"


def test_a_batch_that_does_not_divide_is_refused() -> None:
    config = RunConfig(train=TrainConfig(global_batch_size=10, micro_batch_size=4))
    with pytest.raises(ConfigError, match="train.global_batch_size=10"):
        deepspeed_config(config, 3)
