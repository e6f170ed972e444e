"""Exports loaded by transformers: stock encoders, mask decoder, pipelines, dtypes."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DebertaV2ForMaskedLM

from megatron_deberta.config.schema import ModelConfig, with_task_head
from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf import MegatronDebertaForMaskedLM
from megatron_deberta.hf import export_model as export_model_module
from megatron_deberta.hf.export_model import ExportResult, export_model, write_hf_model
from megatron_deberta.hf.loading import build_model, temporary_module_cache
from megatron_deberta.hf.model_card import loading_lines
from megatron_deberta.hf.published import open_release
from megatron_deberta.model.inputs import ModelInputs
from tests.support.selection import every
from tests.support.tiny_models import V1, V2, random_weights, reader, tiny_tokenizer
from tests.support.tolerances import FP32_MODEL

Exported: TypeAlias = Callable[[str], tuple[Path, ExportResult]]
SEPARATE = replace(V2, share_position_projections=False)
STOCK = {
    "v3-like": V2,
    "1.5b-like": replace(V2, conv_kernel_size=3),
    "conv-tanh": replace(V2, conv_kernel_size=5, conv_activation="tanh"),
    "separate": SEPARATE,
    "v2-linear": replace(V2, position_buckets=0, max_relative_positions=16),
    "v2-c2p": replace(V2, position_terms="c2p"),
    "v2-p2c": replace(SEPARATE, position_terms="p2c", position_key_bias=False),
    "v2-none": replace(V2, position_terms="none"),
    "no-decoder": replace(V2, mask_decoder_passes=0, absolute_positions="none"),
    "v1": V1,
    "v1-short-span": replace(V1, max_relative_positions=8),
    "v1-c2p": replace(V1, position_terms="c2p"),
    "v1-p2c": replace(V1, position_terms="p2c"),
    "v1-none": replace(V1, position_terms="none"),
}
ROBERTA = replace(V2, position_terms="none", absolute_positions="input", mask_decoder_passes=0)
OWN = {
    "paper-index": replace(V2, p2c_index="paper"),
    "deberta-ap": replace(V2, absolute_positions="input", mask_decoder_passes=0),
    "input-and-decoder": replace(V2, absolute_positions="input"),
    "shared-without-key-bias": replace(V2, key_bias=False),
    "v1-with-conv": replace(V1, conv_kernel_size=3),
    "three-passes-no-positions": replace(
        V2, p2c_index="paper", mask_decoder_passes=3, absolute_positions="none"
    ),
}


CONFIGS = STOCK | OWN | {"roberta": ROBERTA}


@pytest.fixture(autouse=True)
def _temporary_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers cache remote code in a temporary folder."""
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)


def export(config: ModelConfig, output: Path, dtype: str = "fp32") -> ExportResult:
    return export_model(
        config, reader(random_weights(config)), tiny_tokenizer(), output, dtype=dtype
    )


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory,
) -> Exported:
    """Return a function that exports a config once; transformers caches code by folder name."""
    root = tmp_path_factory.mktemp("exports")

    @functools.cache
    def get(name: str) -> tuple[Path, ExportResult]:
        return root / name, export(CONFIGS[name], root / name)

    return get


def make_batch(length: int = 41) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 70, (3, length), generator=generator)
    lengths = torch.tensor([length, length - 9, 7])
    mask = torch.arange(length) < lengths[:, None]
    return ids.masked_fill(~mask, 0), mask


def our_logits(config: ModelConfig, ids: Tensor, mask: Tensor | None) -> Tensor:
    with torch.no_grad():
        return build_model(config, reader(random_weights(config)), "reference").logits(
            ModelInputs(ids, mask)
        )


@pytest.mark.parametrize("name", every(3, STOCK))
def test_stock_encoder_and_exported_fill_mask_load(name: str, exported: Exported) -> None:
    config = STOCK[name]
    folder, result = exported(name)
    assert result.model_type == ("deberta" if name.startswith("v1") else "deberta-v2")
    assert result.reason == ""
    assert result.check.max_error < 1e-5

    encoder, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(encoder).__module__.startswith("transformers.models.")
    assert not report["missing_keys"]
    filler, report = MegatronDebertaForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids, mask = make_batch()
    model = build_model(config, reader(random_weights(config)), "reference")
    with torch.no_grad():
        states = encoder.eval()(ids, attention_mask=mask.long()).last_hidden_state
        logits = filler.eval()(ids, attention_mask=mask.long()).logits
        torch.testing.assert_close(
            logits[mask], model.logits(ModelInputs(ids, mask))[mask], **FP32_MODEL
        )
        expected = model.encode(ModelInputs(ids, mask))
        torch.testing.assert_close(states[mask], expected[mask], **FP32_MODEL)


@pytest.mark.parametrize("base", [V2, V1, ROBERTA, OWN["paper-index"]])
def test_segment_pairs_keep_token_types_and_the_next_sentence_head(
    base: ModelConfig, tmp_path: Path
) -> None:
    """The export itself compares logits, states and next-sentence logits with two segments."""
    config = replace(base, type_vocab_size=2, next_sentence_head=True)
    result = export(config, tmp_path / "out")
    assert result.check.max_error < 1e-5
    # As a user calls it: transformers' pipelines pass on what the tokenizer returns.
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pair = tokenizer("She sells shells.", "He counts them.")
    first = pair["input_ids"].index(tokenizer.sep_token_id) + 1
    assert pair["token_type_ids"] == [0] * first + [1] * (len(pair["input_ids"]) - first)
    back = open_release(tmp_path / "out", "hf", tmp_path)
    assert back.config.type_vocab_size == 2
    assert back.config.next_sentence_head
    assert back.notes == ()
    weights = random_weights(config)
    found = dict(back.tensors())
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
    if result.model_type == "megatron-deberta":
        return
    classifier, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert classifier.config.id2label == {0: "IsNext", 1: "NotNext"}
    ids, mask = make_batch()
    types = (torch.arange(ids.size(1)) > 20).long().expand_as(ids)
    model = build_model(config, reader(weights), "reference")
    inputs = ModelInputs(ids, mask, token_type_ids=types)
    with torch.no_grad():
        logits = classifier.eval()(ids, attention_mask=mask.long(), token_type_ids=types).logits
        expected = model.next_sentence_logits(inputs)
        torch.testing.assert_close(logits, expected, **FP32_MODEL)
        # The mask decoder's results are unchanged.
        picked = torch.tensor([[3, 5, -1]] * 3)
        _, pairs = model.decode(inputs, picked)
        torch.testing.assert_close(pairs, expected, **FP32_MODEL)


def test_a_tokenizer_without_token_types_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_model_module, "_save_tokenizer", lambda t, f, c: t.save(str(f)))
    config = replace(V2, type_vocab_size=2, next_sentence_head=True)
    with pytest.raises(CheckpointError, match="gives other token_type_ids than training"):
        export(config, tmp_path / "out")


def test_pieces_of_a_token_classifier_have_no_spaces(tmp_path: Path) -> None:
    """Spans of entities begin with their first letter."""
    config = with_task_head(V2, "tokens", ("O", "B-PER", "I-PER"))
    export(config, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (
        "The quick  brown fox jumps over the lazy dog.",
        " She sells\tsea shells ",
        "a",
        "",
    ):
        found = tokenizer(text, return_offsets_mapping=True)
        ids = [tiny_tokenizer().cls_id, *tiny_tokenizer().encode(text), tiny_tokenizer().sep_id]
        assert found["input_ids"] == ids
        pieces = [text[start:end] for start, end in found["offset_mapping"]]
        assert pieces == [piece.strip() for piece in pieces]
    lines = loading_lines(config, "deberta-v2", str(tmp_path / "out"))
    assert lines["token-classification"].endswith(', aggregation_strategy="first")')
    run = transformers.pipeline(
        "token-classification", model=str(tmp_path / "out"), aggregation_strategy="first"
    )
    text = "The quick brown fox jumps over the lazy dog."
    spans = [(e["start"], e["end"]) for e in run(text)]
    assert spans
    # A span has whole words, but for pieces that hold nothing but the space before a word.
    borders = {m.span()[side] for m in re.finditer(r"\S+", text) for side in (0, 1)}
    assert all(a in borders and (b in borders or b == a + 1) for a, b in spans)


@pytest.mark.parametrize(
    ("name", "old"), [("v3-like", "DebertaV2ForMaskedLM"), ("v1", "DebertaForMaskedLM")]
)
def test_class_names_of_earlier_exports_load(
    name: str, old: str, exported: Exported, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported(name)[0], tmp_path / "earlier")
    fields = json.loads((folder / "config.json").read_text())
    fields["auto_map"] = {"AutoModelForMaskedLM": f"modeling_megatron_deberta.{old}"}
    fields["p2c_index"] = "released"
    (folder / "config.json").write_text(json.dumps(fields))
    load = transformers.AutoModelForMaskedLM.from_pretrained
    models = [
        load(folder, trust_remote_code=True),
        MegatronDebertaForMaskedLM.from_pretrained(folder),
    ]
    ids, mask = make_batch()
    expected = our_logits(CONFIGS[name], ids, mask)[mask]
    for model in models:
        logits = model.eval()(ids, attention_mask=mask.long()).logits[mask]
        torch.testing.assert_close(logits, expected, **FP32_MODEL)
    assert open_release(folder, None, tmp_path).config.p2c_index == "microsoft"


@pytest.mark.parametrize("name", every(2, OWN))
def test_models_unsupported_by_stock_classes_are_exported_as_own_type(
    name: str, exported: Exported
) -> None:
    config = OWN[name]
    folder, result = exported(name)
    assert result.model_type == "megatron-deberta"
    assert result.reason
    fields = json.loads((folder / "config.json").read_text())
    assert fields["model_type"] == "megatron-deberta"
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModel.from_pretrained(folder, trust_remote_code=False)
    ids, mask = make_batch()
    expected = our_logits(config, ids, mask)[mask]
    for kind, options in (
        (MegatronDebertaForMaskedLM, {}),
        (transformers.AutoModelForMaskedLM, {"trust_remote_code": True}),
    ):
        model = kind.from_pretrained(folder, **options).eval()
        with torch.no_grad():
            logits = model(ids, attention_mask=mask.long()).logits[mask]
        torch.testing.assert_close(logits, expected, **FP32_MODEL)
    encoder = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert encoder(ids, attention_mask=mask.long()).last_hidden_state.shape == (*ids.shape, 32)


@pytest.mark.parametrize("base", every(2, ["v3-like", "1.5b-like", "v1", "deberta-ap", "roberta"]))
def test_autoregressive_form_is_a_causal_language_model(base: str, tmp_path: Path) -> None:
    config = replace(CONFIGS[base], head="autoregressive")
    result = export(config, tmp_path / "out")
    assert (result.model_type, result.reason) == ("megatron-deberta", "the autoregressive form")
    assert result.check.max_error < 1e-5
    with temporary_module_cache():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", trust_remote_code=True
        ).eval()
    ids, mask = make_batch(19)
    ours = build_model(config, reader(random_weights(config)), "reference")
    with torch.no_grad():
        expected = ours.masked_logits(ModelInputs(ids, mask, causal=True))
        out = model(ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100))
        torch.testing.assert_close(out.logits[mask], expected[mask], **FP32_MODEL)
        following = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
        loss = torch.nn.functional.cross_entropy(
            expected[:, :-1].flatten(0, 1), following.flatten()
        )
        torch.testing.assert_close(out.loss, loss, **FP32_MODEL)
        row = ids[:1]
        for _ in range(3):
            best = ours.masked_logits(ModelInputs(row, causal=True))[:, -1].argmax(-1, keepdim=True)
            row = torch.cat([row, best], 1)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids[:1], **options), row)
    with pytest.raises(ValueError, match="pad on the right"):
        model(ids, attention_mask=mask.flip(1).long())
    back = open_release(tmp_path / "out", "hf", tmp_path)
    assert back.config.head == "autoregressive"
    assert back.why_no_masks == "its head is autoregressive"


def test_roberta_is_exported_as_roberta(exported: Exported) -> None:
    folder, result = exported("roberta")
    assert result.model_type == "roberta"
    assert not list(folder.glob("*.py"))
    model, report = transformers.AutoModelForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(model) is transformers.RobertaForMaskedLM
    assert not report["missing_keys"]
    ids, mask = make_batch()
    with torch.no_grad():
        logits = model.eval()(ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(logits[mask], our_logits(ROBERTA, ids, mask)[mask], **FP32_MODEL)


@pytest.mark.parametrize("name", ["v3-like", "v1", "paper-index"])
def test_pipeline_uses_the_mask_decoder(
    name: str, exported: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    text = "The quick brown [MASK] jumps"
    filler = transformers.pipeline(
        "fill-mask", model=str(exported(name)[0]), trust_remote_code=True, top_k=3
    )
    answers = filler(text)
    assert type(filler.model).__module__.startswith("transformers_modules")
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.cls_id, *tokenizer.encode(text, parse_special=True), tokenizer.sep_id]
    row = torch.tensor([ids])
    probabilities = our_logits(CONFIGS[name], row, None)[0, ids.index(tokenizer.mask_id)].softmax(
        -1
    )
    best = probabilities.topk(3)
    assert [answer["token"] for answer in answers] == best.indices.tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert not [record for record in caplog.records if "not supported" in record.message]


def test_stock_masked_lm_is_correct_without_mask_decoder(exported: Exported) -> None:
    config = STOCK["no-decoder"]
    folder, _ = exported("no-decoder")
    model, report = DebertaV2ForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    ids, mask = make_batch()
    with torch.no_grad():
        logits = model.eval()(ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(logits[mask], our_logits(config, ids, mask)[mask], **FP32_MODEL)


@pytest.mark.parametrize(("dtype", "name"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_precision(dtype: str, name: str, tmp_path: Path) -> None:
    result = export(V2, tmp_path / "out", dtype)
    assert 0 < result.check.low_precision_error < 0.02
    model = MegatronDebertaForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.dtype == getattr(torch, name)


def test_weight_beyond_fp16_raises_and_leaves_no_files(tmp_path: Path) -> None:
    weights = random_weights(V2)
    weights["head.transform.weight"][0, 0] = 1e6
    with pytest.raises(CheckpointError, match="lm_head.dense.weight holds 1e\\+06.*bf16"):
        export_model(V2, reader(weights), tiny_tokenizer(), tmp_path / "out", dtype="fp16")
    assert list(tmp_path.iterdir()) == []


def test_export_with_a_different_result_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong field in config.json is detected by the comparison."""

    def wrong(folder: Path, *rest: object) -> None:
        write_hf_model(folder, *rest)
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"share_att_key": true', '"share_att_key": false'))

    monkeypatch.setattr("megatron_deberta.hf.export_model.write_hf_model", wrong)
    with pytest.raises(CheckpointError, match="lacks"):
        export(V2, tmp_path / "out")

    def wrong_decoder(folder: Path, *rest: object) -> None:
        write_hf_model(folder, *rest)
        path = folder / "config.json"
        path.write_text(
            path.read_text().replace('"mask_decoder_passes": 2', '"mask_decoder_passes": 1')
        )

    monkeypatch.setattr("megatron_deberta.hf.export_model.write_hf_model", wrong_decoder)
    with pytest.raises(CheckpointError, match="logits of the export differ"):
        export(V2, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", [V2, OWN["paper-index"]])
def test_exported_code_is_the_code_that_is_checked(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is loaded instead of the package's module, and is unloaded afterwards."""

    def copy(source: Path, target: Path) -> None:
        text = source.read_text()
        changed = text.replace("        logits = head(", "        logits = 1.01 * head(")
        assert changed != text
        target.write_text(changed)

    path, modules = list(sys.path), set(sys.modules)
    with monkeypatch.context() as patch:
        patch.setattr("megatron_deberta.hf.export_model.shutil", SimpleNamespace(copyfile=copy))
        with pytest.raises(CheckpointError, match="logits of the export differ"):
            export(config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export(config, tmp_path / "out")
    assert sys.path == path
    assert not [name for name in set(sys.modules) - modules if "transformers_modules" in name]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_weights_are_split_into_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_weights(V2)
    monkeypatch.setattr("megatron_deberta.hf.export_model.MAX_SHARD_BYTES", 40_000)
    export_model(V2, reader(weights), tiny_tokenizer(), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert all((tmp_path / "out" / file).stat().st_size < 48_000 for file in files)
    total = sum(value.numel() * 4 for value in weights.values())
    assert index["metadata"]["total_size"] == total


def test_loss_resize_and_saving_again(exported: Exported, tmp_path: Path) -> None:
    model = MegatronDebertaForMaskedLM.from_pretrained(exported("v3-like")[0]).eval()
    ids, mask = make_batch()
    labels = torch.where(torch.arange(ids.size(1)) == 3, ids, -100)
    out = model(ids, attention_mask=mask.long(), labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, 3], ids[:, 3])
    torch.testing.assert_close(out.loss, expected)

    model.save_pretrained(tmp_path / "again")
    again = MegatronDebertaForMaskedLM.from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(again(ids, mask).logits, model(ids, mask).logits)

    grown = model.resize_token_embeddings(V2.vocab_size + 8)
    assert grown.num_embeddings == V2.vocab_size + 8
    logits = model(ids, attention_mask=mask.long()).logits
    assert logits.size(-1) == V2.vocab_size + 8
    torch.testing.assert_close(logits[..., : V2.vocab_size], out.logits)
