"""Low-rank adapters, compared with peft's on transformers' classes in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.store import local_part
from megatron_deberta.checkpoint.views import open_part
from megatron_deberta.config.schema import Head, ModelConfig, RunConfig
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import ConfigError
from megatron_deberta.hf.adapters import export_adapters, peft_names
from megatron_deberta.hf.config import SpecialIds, choose_model_type
from megatron_deberta.hf.export_model import write_hf_model
from megatron_deberta.hf.heads import HEADS as EXPORTED_HEADS
from megatron_deberta.model.low_rank import FIRST, HEAD_PREFIXES, SECOND
from megatron_deberta.model.weight_init import fill_initial
from megatron_deberta.objectives.labelled import TaskModel
from tests.parity.test_task_export import ARCHITECTURES
from tests.support.checkpoints import metadata, save_state
from tests.support.judges import record
from tests.support.labelled import labelled_run, labelled_steps

pytestmark = pytest.mark.slow

GROUPS = single_process_groups(torch.device("cpu"))
LIMIT = 1e-6
ALL = ("query", "key", "value", "output", "up", "down")
CASES: list[tuple[str, Head, tuple[str, ...]]] = [
    ("deberta-v2", "classification", ALL),
    ("deberta-v2", "tokens", ("query", "key", "value")),
    ("deberta-v2", "embed", ("query", "down")),
    ("deberta", "spans", ("output", "up", "down")),
    ("roberta", "regression", ("key", "up")),
]


def save(run: RunConfig, folder: Path) -> CheckpointReader:
    """Write a checkpoint with random adapters and head."""
    model = build_model(run, GROUPS)
    engine = build_engine(run, model.module, model.specs, GROUPS)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return CheckpointReader(save_state(folder, engine, model.specs, GROUPS, metadata(1, run)))


def run_of(base: ModelConfig, head: Head, targets: tuple[str, ...]) -> RunConfig:
    run = labelled_run(head, model=base, lora_rank=3, lora_targets=targets)
    return replace(run, finetune=replace(run.finetune, lora_alpha=5.0))


@pytest.mark.parametrize(("kind", "head", "targets"), CASES)
def test_logits_and_gradients(
    kind: str, head: Head, targets: tuple[str, ...], tmp_path: Path
) -> None:
    """An adapter folder opens in peft with our logits and gradients, its head included."""
    peft = pytest.importorskip("peft")
    run = run_of(ARCHITECTURES[kind], head, targets)
    reader = save(run, tmp_path / "run")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    # The base has another head.
    write_hf_model(
        base, run.model, choose_model_type(run.model)[0], without_head(reader), SpecialIds()
    )
    export_adapters(run, reader, adapter, "fp32")
    wrapped = getattr(transformers, EXPORTED_HEADS[head].auto_class).from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(wrapped, adapter, is_trainable=True).double().eval()

    built = build_model(run, GROUPS, torch.float64)
    model = built.module.eval()
    assert isinstance(model, TaskModel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(local_part(reader.tensor(name), built.specs[name]))
    batch = next(labelled_steps(run, GROUPS))[0]
    # Embeddings are fp32.
    found, mask = model.logits(batch.inputs).double(), batch.inputs.is_token
    expected = outputs(theirs, head, batch)
    if found.dim() == 3:
        found, expected = found[mask], expected[mask]
    torch.testing.assert_close(found, expected, rtol=LIMIT, atol=LIMIT)
    found.square().sum().backward()
    expected.square().sum().backward()
    trained = {
        name.replace(".modules_to_save", "").replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    names = peft_names(run, reader.shapes)
    assert set(names.values()) == set(trained)
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name in names:
            gradient = trained[names[name]]
            assert parameter.grad is not None
            # Their square roots of head sizes are fp32.
            error = (parameter.grad - gradient).abs().max() / gradient.abs().max()
            worst = max(worst, error.item())
    assert worst < LIMIT
    record(
        "peft",
        peft.__version__,
        f"LoRA of {kind}, head {head}: logits and gradients, from our adapter folder",
        f"{worst:.1e}",
        f"{LIMIT:.0e}",
        len(names),
    )


def without_head(reader: CheckpointReader) -> Callable[[str], Tensor]:
    """Return the weights with a head of zeros."""

    def read(name: str) -> Tensor:
        tensor = reader.tensor(name)
        return torch.zeros_like(tensor) if name.startswith(HEAD_PREFIXES) else tensor

    return read


def outputs(model: Any, head: Head, batch: TaskBatch) -> Tensor:
    """Return the outputs of transformers' class in the form of ours."""
    mask = batch.inputs.is_token
    out = model(input_ids=batch.inputs.input_ids, attention_mask=mask.long())
    if head == "embed":
        states = out.last_hidden_state * mask.unsqueeze(-1)
        mean: Tensor = states.sum(1) / mask.sum(1, keepdim=True)
        return mean
    if head == "spans":
        return torch.stack([out.start_logits, out.end_logits], -1)
    logits: Tensor = out.logits
    return logits


def test_merged_weights_equal_merge_and_unload(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run = run_of(ARCHITECTURES["deberta-v2"], "classification", ALL)
    reader = save(run, tmp_path / "run")
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    for folder, read in (
        (base, reader.tensor),
        (merged, open_part(reader, run.model, "discriminator")[1].tensor),
    ):
        folder.mkdir()
        write_hf_model(folder, run.model, "deberta-v2", read, SpecialIds())
    export_adapters(run, reader, adapter, "fp32")
    auto_class = transformers.AutoModelForSequenceClassification
    wrapped = peft.PeftModel.from_pretrained(auto_class.from_pretrained(base), adapter)
    theirs = wrapped.merge_and_unload().state_dict()
    ours = auto_class.from_pretrained(merged).state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=LIMIT, atol=LIMIT)


def test_initial_weights() -> None:
    """A and B start with the same distribution as in peft."""
    peft = pytest.importorskip("peft")
    layer = nn.Sequential(nn.Linear(400, 300))
    config = peft.LoraConfig(r=16, target_modules=["0"])
    theirs = dict(peft.get_peft_model(layer, config).named_parameters())
    shapes = {FIRST: (16, 400), SECOND: (300, 16)}
    for end, shape in shapes.items():
        name = f"base_model.model.0.lora_{end[-1]}.default.weight"
        ours = torch.empty(shape)
        fill_initial(ours, f"encoder.layers.0.ffn.up{end}", shape, ARCHITECTURES["deberta"], 1)
        assert ours.abs().max().item() == pytest.approx(theirs[name].abs().max().item(), rel=1e-2)
        assert ours.std().item() == pytest.approx(theirs[name].std().item(), rel=5e-2)


def test_projections_that_are_one_layer_of_theirs_are_refused(tmp_path: Path) -> None:
    run = run_of(ARCHITECTURES["deberta"], "classification", ("query", "up"))
    reader = save(run, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"lora_targets=\[query,up\].*merged model with --to hf"):
        export_adapters(run, reader, tmp_path / "adapter", "fp32")
