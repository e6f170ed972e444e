"""Exports of fine-tuned models open in transformers' Auto classes with equal logits and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from megatron_deberta.config.schema import (
    CLASS_HEADS,
    SINGLE_OUTPUT_HEADS,
    Head,
    ModelConfig,
    with_task_head,
)
from megatron_deberta.evaluate.models import open_release_weights, open_source_model
from megatron_deberta.hf.config import SpecialIds, choose_model_type, has_own_class
from megatron_deberta.hf.export_model import write_hf_model
from megatron_deberta.hf.heads import HEADS as EXPORTED_HEADS
from megatron_deberta.hf.loading import build_task_model, temporary_module_cache
from megatron_deberta.hf.names import ModelType
from megatron_deberta.model import parameter_shapes
from tests.support.labelled import HEADS, LABELS, SMALL, labelled_rows, labelled_run

V1 = replace(
    SMALL, key_bias=False, share_position_projections=False, normalize_position_table=False,
    position_buckets=0, position_key_bias=False, pooler_activation="tanh",
)  # fmt: skip
ROBERTA = replace(
    SMALL, absolute_positions="input", position_terms="none", mask_decoder_passes=0,
    position_buckets=0, share_position_projections=False, normalize_position_table=False,
)  # fmt: skip
ARCHITECTURES = {
    "deberta-v2": SMALL,
    "deberta": V1,
    "roberta": ROBERTA,
    "megatron-deberta": replace(V1, conv_kernel_size=3),
}


def weights(config: ModelConfig) -> Callable[[str], Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=generator) / 10 + name.endswith("norm.weight")
        for name, shape in parameter_shapes(config).items()
    }
    return tensors.__getitem__


def fine_tuned(head: Head, base: ModelConfig = SMALL) -> ModelConfig:
    return with_task_head(base, head, LABELS if head in CLASS_HEADS else ())


@pytest.fixture(autouse=True)
def _module_cache() -> Iterator[None]:
    with temporary_module_cache():
        yield


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_and_labels(kind: ModelType, head: Head, tmp_path: Path) -> None:
    config = fine_tuned(head, ARCHITECTURES[kind])
    assert choose_model_type(config)[0] == kind
    read = weights(config)
    write_hf_model(tmp_path, config, choose_model_type(config)[0], read, SpecialIds())
    ours = build_task_model(config, read)
    auto_class = getattr(transformers, EXPORTED_HEADS[config.head].auto_class)
    is_own = has_own_class(config, kind)
    assert is_own == (kind == "megatron-deberta" or (kind, head) == ("deberta", "choices"))
    assert any(tmp_path.glob("*.py")) == is_own
    theirs, report = auto_class.from_pretrained(
        tmp_path, output_loading_info=True, trust_remote_code=True
    )
    assert type(theirs).__module__.startswith("transformers.models.") == (not is_own)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    if head in CLASS_HEADS:
        assert tuple(theirs.config.id2label.values()) == LABELS
        assert theirs.config.label2id == {name: number for number, name in enumerate(LABELS)}
    if head == "multilabel":
        assert theirs.config.problem_type == "multi_label_classification"
    if head == "regression":
        assert (theirs.config.problem_type, theirs.config.num_labels) == ("regression", 1)

    rows = labelled_rows(labelled_run(head))
    batch = rows.batch(*[torch.arange(4).numpy()] * 2)
    ids, mask = batch.inputs.input_ids, batch.inputs.is_token
    assert not mask.all()
    with torch.no_grad():
        logits = ours.logits(batch.inputs)
        if head == "choices":
            out = theirs.eval()(input_ids=ids[None], attention_mask=mask[None].long())
            logits = logits.view(1, -1)
        else:
            out = theirs.eval()(input_ids=ids, attention_mask=mask.long())
    expected = (
        torch.stack([out.start_logits, out.end_logits], -1) if head == "spans" else out.logits
    )
    if logits.dim() == 3:
        logits, expected = logits[mask], expected[mask]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_an_export_is_a_model_to_predict_with_or_to_fine_tune(head: Head, tmp_path: Path) -> None:
    config = fine_tuned(head)
    read = weights(config)
    write_hf_model(tmp_path, config, "deberta-v2", read, SpecialIds())
    source = open_source_model(tmp_path)
    assert (source.config.head, source.config.labels) == (config.head, config.labels)
    for name in parameter_shapes(config):
        torch.testing.assert_close(source.read(name), read(name), rtol=0, atol=0)
    other = labelled_run("tokens" if head != "tokens" else "classification")
    encoder = open_release_weights(tmp_path, other)
    if head in SINGLE_OUTPUT_HEADS:
        # One score per row is the same head for both kinds of tasks.
        for each in SINGLE_OUTPUT_HEADS:
            found = open_release_weights(tmp_path, labelled_run(each))
            assert set(found.shapes) == set(parameter_shapes(config))
    new = {name for name in parameter_shapes(other.model) if name not in encoder.shapes}
    assert new <= {f"{part}.{kind}" for part in ("pooler.dense", "classifier", "qa_outputs")
                   for kind in ("weight", "bias")}  # fmt: skip


def test_own_heads_have_the_stock_losses(tmp_path: Path) -> None:
    """The loss of a class of the export, from labels, is that of transformers' class."""
    config = fine_tuned("spans", ARCHITECTURES["megatron-deberta"])
    write_hf_model(tmp_path, config, "megatron-deberta", weights(config), SpecialIds())
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(
        tmp_path, trust_remote_code=True
    )
    ids, first, last = torch.arange(5, 17).view(2, 6), torch.tensor([1, 2]), torch.tensor([3, 5])
    out = model(input_ids=ids, start_positions=first, end_positions=last)
    pairs = ((out.start_logits, first), (out.end_logits, last))
    expected = sum(torch.nn.functional.cross_entropy(*pair) for pair in pairs) / 2
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match="output_attentions"):
        model(input_ids=ids, output_attentions=True)
