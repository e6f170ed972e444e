"""The memory formula against what the real model allocates."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.planning.memory import table
from benchmarks.planning.ranks import task_batch
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import (
    FinetuneConfig,
    Head,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RTDConfig,
    RunConfig,
    TrainConfig,
    with_task_head,
)
from megatron_deberta.data.batch import Batch, DecoderRows, TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.deepspeed_engine import REDUCE_BUCKET_ELEMENTS
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.model.flops import is_task_head
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import ModelLosses
from megatron_deberta.objectives.rtd import ReplacedTokenModel
from megatron_deberta.planning.memory import estimate_memory, largest_micro_batch, rows_per_sample
from megatron_deberta.planning.step import step_traffic
from megatron_deberta.train.setup import DTYPES
from tests.support.labelled import labelled_run
from tests.support.selection import every

TOLERANCE = 0.1
CONFIGS = Path(__file__).parents[3] / "configs/runs"
GROUPS = single_process_groups(torch.device("cpu"))
WIDE = ModelConfig(
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    ffn_hidden_size=512,
    vocab_size=1000,
    max_position_embeddings=128,
    max_relative_positions=64,
    position_buckets=16,
)
TWO_LAYERS = replace(WIDE, num_layers=2)
MODELS = {
    "v2": TWO_LAYERS,
    "1.5B-like": replace(TWO_LAYERS, conv_kernel_size=3),
    "large vocabulary": replace(TWO_LAYERS, vocab_size=10000),
    "RoBERTa": replace(
        TWO_LAYERS, position_terms="none", mask_decoder_passes=0, absolute_positions="input"
    ),
    "replaced tokens": replace(TWO_LAYERS, head="rtd"),
}

HEADS: tuple[Head, ...] = ("classification", "spans", "choices")


def run_config(model: ModelConfig, recompute: Any, dtype: Any = "fp32") -> RunConfig:
    config = RunConfig(
        model=model,
        objective=ObjectiveConfig(name=model.head, mask_probability=0.15),
        parallel=ParallelConfig(engine="plain", zero_stage=0, recompute=recompute),
        precision=PrecisionConfig(dtype=dtype),
        train=TrainConfig(micro_batch_size=8),
    )
    return replace(config, data=replace(config.data, sequence_length=128))


def batch(config: RunConfig) -> tuple[Batch | TaskBatch, DropoutSeeds]:
    if is_task_head(config.model):
        return task_batch(config, "cpu")
    rows, length = config.train.micro_batch_size, config.data.sequence_length
    masked = torch.arange(round(0.15 * length)).expand(rows, -1).contiguous()
    ids = torch.randint(5, config.model.vocab_size, (rows, length))
    samples = torch.arange(rows)
    return Batch(ModelInputs(ids), masked, masked + 5, samples), DropoutSeeds(1, 2, samples)


def measured(config: RunConfig) -> int:
    """Peak bytes of forward and backward beyond weights and the gradients of a micro batch."""
    module = build_model(config, GROUPS).module.train()
    inputs = batch(config)
    return peak_of(lambda: objective(module(*inputs)).backward(), module)


def peak_of(run: Callable[[], None], module: torch.nn.Module) -> int:
    """Peak bytes of a second run beyond what there is before it."""
    run()
    tracker = MemTracker()
    tracker.track_external(module)
    with tracker:
        before = total(tracker, "current")
        run()
        return total(tracker, "peak") - before


def predicted(config: RunConfig) -> int:
    """The same, by formula."""
    estimate = estimate_memory(config, 1, attention="chunked", device_type="cpu")
    return estimate.activations + estimate.vocabulary + estimate.workspace


def objective(result: ModelLosses) -> Tensor:
    """Return the sum of the losses, of both models of replaced-token detection."""
    return torch.stack([found.loss for found in result.losses.values()]).sum()


def total(tracker: MemTracker, moment: str) -> int:
    snapshot = tracker.get_tracker_snapshot(moment)
    return sum(int(devices["Total"]) for devices in snapshot.values())


def with_recompute(names: Iterable[str], quick: str) -> list[Any]:
    """Return test parameters: each name with no, selective and full recomputation.

    Args:
        names: first parameter.
        quick: name without marks; the others are marked slow, with recomputation nightly.
    """
    return [
        (name, kind) if name == quick
        else pytest.param(
            name, kind, marks=pytest.mark.slow if kind == "none" else pytest.mark.nightly
        )
        for name in names
        for kind in ("none", "selective", "full")
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "recompute"), with_recompute(MODELS, "1.5B-like"))
def test_peak_of_the_real_model(name: str, recompute: Any) -> None:
    config = run_config(MODELS[name], recompute)
    assert predicted(config) == pytest.approx(measured(config), rel=TOLERANCE)


@pytest.mark.parametrize("recompute", every(2, ["none", "full"], ["nightly"]))
def test_peak_of_alternating_updates(recompute: Any) -> None:
    config = run_config(MODELS["replaced tokens"], recompute)
    config = replace(config, rtd=RTDConfig(update="alternating"))
    module = build_model(config, GROUPS).module.train()
    assert isinstance(module, ReplacedTokenModel)
    rows, seeds = batch(config)
    assert isinstance(rows, Batch)

    def run() -> None:
        generated = module.generate(rows, seeds)
        objective(generated).backward()
        module.generator.zero_grad()
        assert generated.outputs is not None
        objective(module.detect(rows, generated.outputs, seeds)).backward()

    assert predicted(config) == pytest.approx(peak_of(run, module), rel=TOLERANCE)
    assert predicted(config) < predicted(replace(config, rtd=RTDConfig()))


@pytest.mark.parametrize("recompute", every(2, ["full", "none"], ["nightly"]))
def test_peak_with_a_decoder(recompute: Any) -> None:
    config = run_config(TWO_LAYERS, recompute)
    config = replace(config, objective=ObjectiveConfig(name="retromae", mask_probability=0.15))
    module = build_model(config, GROUPS).module.train()
    rows, seeds = batch(config)
    assert isinstance(rows, Batch)
    ids = rows.inputs.input_ids
    masked = torch.arange(0, ids.size(1), 2).expand(len(ids), -1).contiguous()
    rows = replace(rows, decoder=DecoderRows(ids, masked, masked + 5))
    found = peak_of(lambda: objective(module(rows, seeds)).backward(), module)
    assert predicted(config) == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.parametrize(("head", "recompute"), with_recompute(HEADS, "spans"))
def test_peak_of_fine_tuning(head: Head, recompute: Any) -> None:
    labels = ("no", "yes") if head == "classification" else ()
    config = run_config(
        with_task_head(replace(TWO_LAYERS, conv_kernel_size=3), head, labels), recompute
    )
    config = replace(config, objective=ObjectiveConfig(name=head))
    # Two samples of four choices.
    if head == "choices":
        config = replace(config, train=TrainConfig(micro_batch_size=2))
        config = replace(config, finetune=FinetuneConfig(task="race"))
    assert predicted(config) == pytest.approx(measured(config), rel=TOLERANCE)


def test_rows_of_a_query_are_its_most_passages() -> None:
    config = run_config(with_task_head(TWO_LAYERS, "rerank"), "none")
    for task, rows in (("policyqa_rerank", 10), ("custom_rerank", 1)):
        assert rows_per_sample(replace(config, finetune=FinetuneConfig(task=task))) == rows


def states_of(dtype: str, stage: int, ema_decay: float) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer in a DeepSpeed engine: predicted, and alive."""
    config = replace(
        run_config(WIDE, "none", dtype),
        parallel=ParallelConfig(zero_stage=stage),  # type: ignore[arg-type]
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(ema_decay=ema_decay),
        train=TrainConfig(micro_batch_size=8, global_batch_size=8),
    )
    gc.collect()
    before = [weakref.ref(t) for t in reachable_tensors()]
    model = build_model(config, GROUPS, DTYPES[dtype])
    engine = build_engine(config, model.module, model.specs, GROUPS)
    engine.backward(objective(engine.module(*batch(config))) / 100)
    gc.collect()
    # What an earlier test left may be released while this engine is built, so it is not subtracted.
    left = storages(t for t in (ref() for ref in before) if t is not None)
    new = {k: size for k, size in storages(reachable_tensors()).items() if k not in left}
    # DeepSpeed's reduction buckets are workspace; one may still be held by a gradient's view.
    buckets = [REDUCE_BUCKET_ELEMENTS * size for size in (2, 4)]
    alive = sum(size for size in new.values() if size not in buckets)
    engine.destroy()
    estimate = estimate_memory(config, 1, attention="chunked", device_type="cpu")
    return estimate.weights + estimate.gradients + estimate.optimizer, alive


def reachable_tensors() -> list[Tensor]:
    """CPU tensors that Python can reach."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Other tests leave fake tensors, which have no memory.
        kinds = (torch.Tensor, torch.nn.Parameter)
        return [t for t in gc.get_objects() if type(t) in kinds and t.device.type == "cpu"]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(
    ("dtype", "stage", "ema_decay"),
    every(
        2,
        [("fp32", 1, 0.0), ("bf16", 1, 0.0), ("fp16", 1, 0.0), ("bf16", 2, 0.0), ("bf16", 1, 0.99)],
        ["nightly"],
    ),
)
def test_states_of_deepspeed(dtype: str, stage: int, ema_decay: float) -> None:
    planned, alive = states_of(dtype, stage, ema_decay)
    assert planned == pytest.approx(alive, rel=TOLERANCE)


def test_states_of_adapters() -> None:
    """Frozen weights have neither gradients nor optimizer state."""
    config = labelled_run("classification", lora_rank=4, parallel=ParallelConfig(zero_stage=1))
    parameters = list(build_model(config, GROUPS).module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    estimate = estimate_memory(config, 1, attention="chunked", device_type="cpu")
    assert estimate.weights == 4 * sum(p.numel() for p in parameters)
    assert (estimate.gradients, estimate.optimizer) == (4 * trained, 12 * trained)
    assert trained < 0.4 * estimate.weights / 4
    traffic = {each.purpose: each.num_bytes for each in step_traffic(config, 2)}
    assert traffic["gradients"] == 4 * trained


def test_ranks_share_what_they_split() -> None:
    config = load_config(CONFIGS / "1.5b_h100.yaml")
    alone, many = (estimate_memory(config, dp, attention="triton") for dp in (1, 64))
    assert many.optimizer * 64 == pytest.approx(alone.optimizer, rel=1e-6)
    assert many.weights == alone.weights
    split = replace(config, parallel=replace(config.parallel, tensor_parallel_size=8))
    sequence = replace(split, parallel=replace(split.parallel, sequence_parallel=True))
    activations = [
        estimate_memory(c, 8, attention="triton").activations for c in (config, split, sequence)
    ]
    assert activations[0] > 1.5 * activations[1] > 1.5 * activations[2]


def test_largest_micro_batch_is_the_last_that_fits() -> None:
    config = load_config(CONFIGS / "1.5b_dgx2.yaml")
    capacity = 30 * 2**30
    rows = largest_micro_batch(config, 256, capacity, attention="chunked")
    assert rows > 0
    for extra, fits in ((0, True), (1, False)):
        train = replace(config.train, micro_batch_size=rows + extra)
        tried = estimate_memory(replace(config, train=train), 256, attention="chunked")
        assert (tried.total <= capacity) is fits
    assert largest_micro_batch(config, 256, 2**30, attention="chunked") == 0


def test_the_documented_table_is_the_formulas() -> None:
    assert table() in (CONFIGS.parents[1] / "docs/planning.md").read_text()
