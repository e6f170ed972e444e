"""No shipped run compiles a function for more shapes, or a shape more often, than is allowed.

Beyond ``fused.MAX_COMPILED`` sets of shapes a function runs uncompiled; Dynamo runs a code object
uncompiled that it has compiled ``recompile_limit`` times.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_deberta.config import load_config
from megatron_deberta.config.phases import segments
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.build import form_targets
from megatron_deberta.data.collate import FILLER, BatchBuilder, NextTokens
from megatron_deberta.data.randomness import Purpose
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.parallelize.build import uses_fusion
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.evaluate.validation import evaluate
from megatron_deberta.model import DropoutSeeds, fused
from megatron_deberta.objectives import build_objective
from megatron_deberta.ops import triton as triton_kernels
from megatron_deberta.train.step import TrainStep
from tests.support.labelled import labelled_rows, labelled_run
from tests.unit.train.test_step import part

CONFIGS = Path(__file__).parents[3] / "configs"
RUNS = sorted((CONFIGS / "runs").glob("*.yaml"))
DISTINCT_RUNS = (
    "base_h100", "learn_rtd_cpu", "phases", "retromae_cpu", "table2_segment_pair_h100"
)  # fmt: skip
"""One of each objective and packing, and one with several lengths."""
TASKS = sorted((CONFIGS / "tasks").glob("*.yaml"))
CPU = single_process_groups(torch.device("cpu"))
META = replace(CPU, device=torch.device("meta"))
VOCABULARY = Vocabulary(
    size=97, num_tokens=97, pad_id=0, cls_id=1, sep_id=2, mask_id=3, special_ids=(0, 1, 2, 3),
    word_starts=np.ones(97, np.bool_), fingerprint="",
)  # fmt: skip


class Shapes:
    """Stands for ``fused._compiled``: which functions would be compiled, and how often.

    Attributes:
        guarded: by function and shapes, all other properties of the arguments that Dynamo checks.
    """

    def __init__(self) -> None:
        self.guarded: dict[Any, set[Any]] = defaultdict(set)

    def __call__(self, function: Any, shapes: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            guards = tuple(
                (x.dtype, x.stride(), x.requires_grad) if isinstance(x, Tensor) else x
                for x in arguments
            )
            self.guarded[function, shapes].add(guards)
            return function(*arguments)

        return run

    def check(self) -> None:
        """Assert that half of each limit suffices."""
        limit = torch._dynamo.config.recompile_limit  # type: ignore[attr-defined]
        by_function: dict[str, int] = defaultdict(int)
        for (function, _), guards in self.guarded.items():
            by_function[function.__name__] += 1
            assert len(guards) <= limit // 2, (function, guards)
        assert by_function
        for name, number in by_function.items():
            assert number <= fused.MAX_COMPILED // 2, (name, number)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    found = Shapes()
    monkeypatch.setattr(fused, "_compiled", found)
    return found


def batches_of(config: RunConfig) -> Iterator[Batch]:
    """Yield a micro batch of padding rows of each shape that a run's segments and forms have."""
    seen = set()
    for segment in segments(config):
        part = segment.config
        length = part.data.sequence_length
        for targets in form_targets(part, VOCABULARY, length, Purpose.TRAINING_MASK):
            builder = BatchBuilder(
                cast(Any, None), targets, VOCABULARY, length,
                part.data.attend_across_documents, isinstance(targets, NextTokens),
            )  # fmt: skip
            batch = builder.build([FILLER] * part.train.micro_batch_size)
            if part.model.next_sentence_head:
                batch = replace(
                    batch, next_sentence_labels=torch.zeros(len(batch.inputs.input_ids)).long()
                )
            shapes = tuple(
                value.shape if isinstance(value, Tensor) else value is None
                for value in (getattr(batch, item.name) for item in fields(batch))
            )
            if (type(batch), shapes) in seen:
                continue
            seen.add((type(batch), shapes))
            # Whether rows are full changes no shape, but an argument.
            for mask in (None, batch.inputs.is_token):
                yield replace(batch, inputs=replace(batch.inputs, attention_mask=mask))


def pass_through(module: Any, config: RunConfig, batch: Batch) -> None:
    """Run forward and backward of all updates of a micro batch, without values."""
    batch = batch.to(META.device)
    outputs = None
    for update in build_objective(config).updates:
        seeds = DropoutSeeds(1, batch.sample_index[0], batch.dropout_keys)
        found = update.compute(module, batch, seeds, outputs)
        torch.stack([each.loss for each in found.losses.values()]).sum().backward()
        outputs = found.outputs


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.slow if path.stem in DISTINCT_RUNS else pytest.mark.nightly,
        )
        for path in RUNS
    ],
)
def test_a_run_stays_below_every_limit(path: Path, shapes: Shapes) -> None:
    """In training, for all segments, short steps and forms."""
    config = reduced(load_config(path))
    module = build_model(config, META, torch.bfloat16).module.train()
    batches = list(batches_of(config))
    for batch in batches:
        pass_through(module, config, batch)
    shapes.check()
    compiled = len(shapes.guarded)
    # In evaluation nothing is compiled, whatever the shapes.
    module.eval()
    with torch.no_grad():
        for batch in batches:
            for rows in (batch, part(batch, 0, 1)):
                module(rows.to(META.device), None)
    assert len(shapes.guarded) == compiled


def reduced(config: RunConfig) -> RunConfig:
    """Return a narrow run of three layers with fusion, which has as many shapes."""
    model = replace(
        config.model, num_layers=3, hidden_size=32, num_heads=2, ffn_hidden_size=64, vocab_size=97,
        generator_layers=0,
    )  # fmt: skip
    parallel = replace(
        config.parallel, fuse=True, attention_backend="chunked", tensor_parallel_size=1,
        sequence_parallel=False,
    )  # fmt: skip
    return replace(config, model=model, parallel=parallel)


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_fine_tuning_compiles_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have hundreds of lengths, so ``parallel.fuse: auto`` is off even on a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_kernels, "TRITON_INSTALLED", True)
    gpu, run = torch.device("cuda"), RunConfig()
    assert uses_fusion(run, gpu)
    assert not uses_fusion(replace(run, finetune=replace(run.finetune, task=str(path))), gpu)


@pytest.mark.slow
def test_lengths_beyond_the_limit_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fine-tuning with ``parallel.fuse: true`` compiles the first shapes only, and says so once."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(fused, "MAX_COMPILED", 2)
    run = labelled_run("tokens", dropout=0.1)
    run = replace(run, parallel=replace(run.parallel, fuse=True, attention_backend="chunked"))
    rows = labelled_rows(run)
    with fresh_compiler():
        module = build_model(run, CPU).module
        for length in (7, 8, 9, 10):
            numbers = np.flatnonzero(rows.lengths >= length)[:2]
            batch = rows.batch(numbers, numbers)
            batch = replace(batch._map(lambda x, n=length: x[:, :n] if x.dim() == 2 else x))
            found = module(batch, DropoutSeeds(1, 2, batch.dropout_keys)).losses
            loss = next(iter(found.values())).loss
            loss.backward()
    said = [record.getMessage() for record in caplog.records if "not compiled" in record.message]
    assert len(said) == len(set(said)) > 0


class fresh_compiler:  # noqa: N801
    """Context without functions compiled before, in which reaching Dynamo's limit is an error."""

    def __enter__(self) -> None:
        self._clear()
        settings = {"fail_on_recompile_limit_hit": True, "recompile_limit": 4}
        self._patch = torch._dynamo.config.patch(**settings)  # type: ignore[attr-defined]
        self._patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)
        self._clear()

    def _clear(self) -> None:
        torch._dynamo.reset()
        fused.compiled.cache_clear()
        fused._compiled.cache_clear()
        fused._numbers.clear()


@pytest.mark.nightly
def test_dynamo_reaches_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with many row lengths, two forms and validation, compiled by Dynamo (not Inductor)."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = load_config(CONFIGS / "runs" / "table10_deberta_mt_h100.yaml")
    train = replace(config.train, micro_batch_size=2, global_batch_size=4)
    config = replace(
        reduced(replace(config, model=replace(config.model, conv_kernel_size=3), train=train)),
        precision=replace(config.precision, dtype="fp32"),
    )
    parallel = replace(config.parallel, engine="plain", recompute="full")
    config = replace(config, parallel=parallel)
    with fresh_compiler():
        built = build_model(config, CPU)
        engine = build_engine(config, built.module, built.specs, CPU)
        take_step, objective = TrainStep(engine, config, CPU), build_objective(config)
        for step, length in enumerate(range(8, 16, 2)):
            data = replace(config.data, sequence_length=length)
            for batch in batches_of(replace(config, data=data)):
                labels = batch.labels.clone()
                labels[:, 0] = 5
                batch = replace(batch, labels=labels)
                loss = take_step(step, [batch, batch]).loss
                assert np.isfinite(loss)
                assert evaluate(built.module, [batch, part(batch, 0, 1)], CPU, objective)
        assert fused._compiled.cache_info().currsize >= 4 * 4
        assert max(next(numbers) for numbers in fused._numbers.values()) <= fused.MAX_COMPILED
    assert batch.inputs.causal
