"""Commands ``convert`` and ``fill-mask`` on training checkpoints and published files."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.store import find_newest
from megatron_deberta.checkpoint.views import open_part
from megatron_deberta.cli.convert import _graph_usage, _read_texts
from megatron_deberta.cli.fill_mask import read_penalty
from megatron_deberta.cli.main import main
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import (
    DataConfig,
    ModelConfig,
    Phase,
    RunConfig,
    TokenizerConfig,
    TrainConfig,
    with_task_head,
)
from megatron_deberta.data.shards.writer import write_shard
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.evaluate.models import open_release_weights, open_source_model
from megatron_deberta.files import FileLock, published_folder, sha256_file
from megatron_deberta.hf import export_model as export_module
from megatron_deberta.hf.export_model import output_folder
from megatron_deberta.hf.fill_mask import open_filler
from megatron_deberta.hf.loading import (
    load_export_tokenizer,
    load_pretrained,
    temporary_module_cache,
    tokenizer_fields,
)
from megatron_deberta.model import parameter_shapes
from megatron_deberta.tokenizer import load_tokenizer
from tests.support.releases import edited_tensors, write_release
from tests.support.tiny_models import V2, random_weights, tiny_tokenizer
from tests.support.tiny_runs import save_run

TEXT = "The quick brown [MASK] jumps"
UNIGRAM = Path(__file__).parents[2] / "golden" / "unigram.model"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    for step in (2, 3):
        save_run(V2, tmp_path / "run", tmp_path / "tokenizer", step)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the newest checkpoint of ``run_dir``."""
    folder = tmp_path_factory.mktemp("exported")
    save_run(V2, folder / "run", folder / "tokenizer", 3)
    export(folder / "run", folder / "out")
    return folder / "out"


@pytest.fixture
def out(exported: Path, tmp_path: Path) -> Path:
    """A copy of ``exported``."""
    return shutil.copytree(exported, tmp_path / "out")


def convert(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def export(run: Path, out: Path) -> str:
    """Return the card of the export."""
    convert("--checkpoint", run, "--output", out)
    return (out / "README.md").read_text()


def fill(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[tuple[str, str]]:
    """Return the printed predictions, probability and token."""
    capsys.readouterr()
    assert main(["fill-mask", *map(str, arguments)]) == 0
    return predictions(capsys.readouterr().out)


def predictions(output: str) -> list[tuple[str, str]]:
    return re.findall(r"^\s*(\d\.\d{4})\s+(\S+)", output, re.MULTILINE)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_export_takes_the_newest_checkpoint_of_a_run(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    convert("--checkpoint", run_dir, "--to", "hf", "--output", out)
    output = capsys.readouterr().out
    assert "step_00000003 as deberta-v2, fp32" in output
    assert "Verified on real text" in output
    table = load_file(out / "model.safetensors")["deberta.embeddings.word_embeddings.weight"]
    assert torch.equal(table, random_weights(V2, seed=3)["embeddings.token.weight"])
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in (out, *out.iterdir()))


def test_export_says_that_it_is_our_own_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(V2, p2c_index="paper")
    save_run(config, tmp_path / "run", tmp_path / "tokenizer")
    convert("--checkpoint", tmp_path / "run", "--output", tmp_path / "out", "--dtype", "bf16")
    output = capsys.readouterr().out
    assert "as megatron-deberta, bf16" in output
    assert "No class of transformers implements p2c_index: paper" in output
    assert "when computed in bf16" in output


def test_the_export_says_how_to_load_it(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"step": step, "kind": "validation", "loss": 9 - step, "masked_accuracy": 0.5}
        for step in (2, 3, 4)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "metrics.jsonl").write_text(lines)
    out = tmp_path / "out"
    card = export(run_dir, out)
    printed = re.findall(r"^In Python, [\w-]+: (.+)$", capsys.readouterr().out, re.MULTILINE)
    loaded: dict[str, Any] = {}
    with temporary_module_cache():
        for line in printed:
            assert line.replace(str(out), "out") in card
            exec(line, loaded)
    assert type(loaded["model"]).__name__ == "DebertaV2Model"
    long = loaded["fill"](TEXT + " fox" * 99, tokenizer_kwargs={"truncation": True})
    assert len(long) == 5
    assert "| data | books |\n| optimizer steps | 3 of 100,000 |" in card
    assert "| loss, nats per masked token | 6.0000 |" in card
    assert "| masked accuracy | 0.5000 |" in card
    fields = yaml.safe_load(card.split("---\n")[1])
    assert fields["pipeline_tag"] == "fill-mask"
    assert fields["tags"] == ["deberta-v2", "sentence-transformers", "feature-extraction"]
    (result,) = fields["model-index"][0]["results"]
    assert result["dataset"] == {"name": "books", "type": "books", "split": "validation"}
    assert {"type": "masked_accuracy", "value": 0.5} in result["metrics"]


def test_every_checkpoint_becomes_a_revision(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 8):
        save_run(V2, run_dir, tmp_path / "tokenizer", step)
    out = tmp_path / "revisions"
    arguments = ["convert", "--checkpoint", str(run_dir), "--every", "3", "--output", str(out)]
    assert main(arguments) == 0
    names = ["step_00000005", "step_00000008"]
    assert sorted(path.name for path in out.iterdir()) == ["revisions.json", *names]
    listed = json.loads((out / "revisions.json").read_text())
    assert [entry["revision"] for entry in listed] == names
    printed = capsys.readouterr().out
    assert f"hf upload USER/NAME {out}/step_00000005 . --revision step_00000005" in printed
    for step, name in ((5, names[0]), (8, names[1])):
        table = load_file(out / name / "model.safetensors")["deberta.embeddings.LayerNorm.bias"]
        assert torch.equal(table, random_weights(V2, seed=step)["embeddings.norm.bias"])
    # By one command at a time.
    lock = FileLock(out / ".lock")
    assert lock.acquire()
    assert f"{out} is being written by another --every" in error_of(arguments, capsys)
    lock.release()
    # The list keeps what is there, and is written before an export, which may be killed.
    assert main([*arguments[:4], "4", *arguments[5:]]) == 0
    assert json.loads((out / "revisions.json").read_text()) == listed
    (out / "revisions.json").write_text(json.dumps(listed[1:]))
    capsys.readouterr()
    message = error_of(arguments, capsys)
    assert f"{out / names[0]} is not listed in {out}/revisions.json, so it may be the" in message
    # A second call continues.
    shutil.rmtree(out / names[0])
    assert main(arguments) == 0
    assert f"{out}/step_00000008: exported before" in capsys.readouterr().out
    assert (out / names[0] / "config.json").exists()
    # An empty folder is no export; one with other options or of other weights is another export.
    shutil.rmtree(out / names[0])
    (out / names[0]).mkdir()
    assert main(arguments) == 0
    assert f"{names[0]}: exported before" not in capsys.readouterr().out
    assert (out / names[0] / "config.json").exists()
    message = error_of([*arguments, "--dtype", "bf16"], capsys)
    assert f"{out / names[0]} was exported with another dtype; remove it or choose" in message
    shutil.rmtree(run_dir / "checkpoints" / "step_00000008")
    save_run(replace(V2, num_layers=2), run_dir, tmp_path / "tokenizer", 8)
    assert "was exported with another checkpoint" in error_of(arguments, capsys)
    shutil.rmtree(out / names[1])
    (out / names[1]).mkdir()
    (out / names[1] / "notes.txt").touch()
    assert f"{out / names[1]} exists and is not empty" in error_of(arguments, capsys)


def test_every_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(tmp_path), str(tmp_path / "out")
    arguments = ["convert", "--checkpoint", source, "--every", "2", "--output", out]
    assert "--every needs the run's folder" in error_of(arguments, capsys)
    assert not (tmp_path / "out").exists()


def test_model_card_has_every_phase_up_to_the_step(run_dir: Path, tmp_path: Path) -> None:
    phases = (
        Phase(
            steps=2,
            overrides=(
                ("data.sequence_length", 16),
                ("objective.mask_probability", 0.4),
                ("train.global_batch_size", 8),
            ),
        ),
        Phase(
            steps=4,
            overrides=(("data.train", ("/home/me/news.idx",)), ("optimizer.learning_rate", 1e-5)),
        ),
        Phase(steps=20000, overrides=(("data.sequence_length", 24), ("data.train", ("never",)))),
    )
    train = TrainConfig(steps=20006, phases=phases, global_batch_size=4)
    data = DataConfig(
        train=("3", "/data/books", "1", "/data/wiki/"),
        validation=("/data/heldout",),
        sequence_length=32,
    )
    for step in (3, 6):
        save_run(V2, tmp_path / "phased", tmp_path / "tokenizer", step, train, data)
    record = {"step": 6, "kind": "validation", "loss": 2.5, "masked_accuracy": 0.5}
    (tmp_path / "phased" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    card = export(tmp_path / "phased", tmp_path / "out")
    for row in (
        "| data | 0.75 books, 0.25 wiki, then news |",
        "| optimizer steps | 6 of 20,006 |",
        f"| tokens | {2 * 8 * 16 + 4 * 4 * 32:,}, padding included |",
        "| sequence length | 16, then 32 |",
        "| batch size | 8, then 4 |",
        "| peak learning rate | 0.0002, then 1e-05 |",
    ):
        assert row in card
    assert "| masking | 0.4 of the tokens, in spans" in card
    assert ", then 0.15 of the tokens, in spans" in card
    # The validation at step 6 is that of the phase which ends there.
    assert "on heldout: rows of 32 tokens, 0.15 of the tokens masked." in card
    assert "never" not in card
    assert "/data" not in card
    # Its metrics are not those of a copy elsewhere.
    step = tmp_path / "phased" / "checkpoints" / "step_00000006"
    shutil.copytree(step, tmp_path / "phased" / "copies" / "step_00000006")
    copied = export(tmp_path / "phased" / "copies" / "step_00000006", tmp_path / "copied")
    assert "were not evaluated: the run has no validation" in copied


def test_model_card_has_the_lengths_up_to_the_step(tmp_path: Path) -> None:
    data = DataConfig(train=("books",), short_steps=4, short_sequence_length=8, sequence_length=32)
    nonfinite = {"step": 6, "kind": "validation", "loss": None}
    for step, lengths in ((3, "8"), (6, "8, then 32")):
        train = TrainConfig(steps=20_000, global_batch_size=4)
        save_run(V2, tmp_path / "run", tmp_path / "tokenizer", step, train, data)
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(nonfinite) + "\n")
        card = export(tmp_path / "run", tmp_path / f"out{step}")
        assert f"| sequence length | {lengths} |" in card
        tokens = 4 * (min(step, 4) * 8 + max(step - 4, 0) * 32)
        assert f"| tokens | {tokens:,}, padding included |" in card
    assert "the loss of the validation at step 6 is infinite or not a number." in card


def test_fill_mask_answers_alike_from_run_step_and_export(
    run_dir: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = (run_dir, find_newest(run_dir), exported)
    answers = [fill(capsys, model, TEXT, "--top-k", 4) for model in models]
    assert len(answers[0]) == 4
    assert answers[0] == answers[1] == answers[2]
    probabilities = [float(probability) for probability, _ in answers[0]]
    assert probabilities == sorted(probabilities, reverse=True)
    # Several texts, and several masks in one
    two = "The [MASK] brown [MASK] jumps"
    assert main(["fill-mask", str(run_dir), TEXT, two, "--top-k", "2"]) == 0
    output = capsys.readouterr().out
    assert TEXT in output
    assert "[MASK] 2" in output
    assert len(predictions(output)) == 6


def test_fill_mask_takes_a_published_model(
    exported: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Microsoft's format, as ``convert --from microsoft`` reads it."""
    fields = json.loads((out / "config.json").read_text())
    (out / "config.json").unlink()
    del fields["model_type"]
    write_json(out / "model_config.json", fields)
    with edited_tensors(out) as tensors:
        for name in list(tensors):
            tensors[name.replace("deberta.", "bert.")] = tensors.pop(name)
    answers = fill(capsys, exported, TEXT)
    assert len(answers) == 5
    assert answers == fill(capsys, out, TEXT)


def test_fill_mask_refuses_a_model_without_trained_head(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with edited_tensors(out) as tensors:
        del tensors["lm_predictions.lm_head.dense.weight"]
    message = error_of(["fill-mask", str(out), TEXT], capsys)
    assert "lacks lm_predictions.lm_head.dense.weight" in message


def test_prior_weight_divides_by_the_frequency_in_the_shards(
    run_dir: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tokenizer = tiny_tokenizer()
    filler = open_filler(run_dir)
    (plain,) = filler.fill(TEXT, top_k=tokenizer.num_tokens)
    counts = torch.ones(tokenizer.num_tokens)
    common = [each.token_id for each in plain if each.token_id not in tokenizer.special_ids][:9]
    documents = [np.array([token] * (99 - 9 * rank)) for rank, token in enumerate(common)]
    for document in documents:
        counts[document[0]] += document.size
    # Where the run says that its data are
    shard = tmp_path / "shards" / "books"
    named = {"tokenizer_fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    write_shard(str(shard), documents, np.uint16, **named)
    monkeypatch.chdir(tmp_path)

    scores = torch.zeros(tokenizer.num_tokens)
    for each in plain:
        scores[each.token_id] = each.probability
    scores *= (counts / counts.sum()) ** -0.5
    scores[list(tokenizer.special_ids)] = 0
    best = (scores / scores.sum()).topk(5)
    expected = [
        (round(value, 4), tokenizer.decode([token]).strip() or tokenizer.piece(token))
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    assert expected[0][1] != plain[0].text.strip()
    weighted = ["fill-mask", str(run_dir), TEXT, "--prior-weight", "0.5"]
    found = fill(capsys, *weighted[1:])
    assert [token for _, token in found] == [token for _, token in expected]
    assert [float(p) for p, _ in found] == pytest.approx([p for p, _ in expected], abs=2e-4)

    penalty = read_penalty(filler, 0.5, [])
    assert penalty is not None
    assert penalty.isinf().nonzero().flatten().tolist() == list(tokenizer.special_ids)

    weighted[1] = str(exported)
    assert "give the shards with --prior-shards" in error_of(weighted, capsys)
    assert fill(capsys, *weighted[1:], "--prior-shards", f"{shard}.idx") == found
    write_shard(str(shard), documents, np.uint16, **named | {"tokenizer_fingerprint": "f" * 64})
    assert "another tokenizer" in error_of([*weighted, "--prior-shards", str(shard)], capsys)
    for file in shard.parent.iterdir():
        file.unlink()
    message = error_of([*weighted, "--prior-shards", str(shard)], capsys)
    assert "books.idx: No such file" in message
    assert "at least 0" in error_of([*weighted[:-1], "-0.5"], capsys)
    assert "--prior-shards needs --prior-weight above 0" in error_of(
        ["fill-mask", str(run_dir), TEXT, "--prior-shards", "x"], capsys
    )


@pytest.mark.slow
def test_generator_of_a_release_fills_masks_and_its_discriminator_is_refused(
    exported: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As DeBERTaV3 is published: both in one folder, both with a head of masked tokens."""
    new = tmp_path / "new"
    tensors = load_file(out / "model.safetensors")
    torch.save(tensors, out / "pytorch_model.generator.bin")
    (out / "generator_config.json").write_bytes((out / "config.json").read_bytes())
    (out / "model.safetensors").unlink()
    assert "--generator-only" in error_of(["fill-mask", str(out), TEXT], capsys)
    tensors["mask_predictions.classifier.weight"] = torch.ones(1, 32)
    save_file(tensors, out / "model.safetensors")
    message = error_of(["fill-mask", str(out), TEXT], capsys)
    assert "it is a discriminator (DeBERTaV3)" in message
    assert "--generator-only" in message
    digest = sha256_file(out / "pytorch_model.generator.bin")
    options = ["--allow-pickle-weights-only", "--sha256", digest, "--output", new]
    convert("--from", "hf", out, "--generator-only", *options)
    assert f"Fill masks with: megatron-deberta fill-mask {new}" in capsys.readouterr().out
    assert fill(capsys, exported, TEXT) == fill(capsys, new, TEXT)


def test_import_says_why_it_cannot_fill_masks(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with edited_tensors(out) as tensors:
        tensors["mask_predictions.classifier.weight"] = torch.ones(1, 32)
    arguments = ["convert", "--from", "hf", str(out), "--output"]
    convert(*arguments[1:], tmp_path / "new")
    output = capsys.readouterr().out
    assert "It cannot fill masks before it is trained to: it is a discriminator" in output
    # Neither can the import, nor its export, nor an import of that.
    new, again, third = tmp_path / "new", tmp_path / "again", tmp_path / "third"
    refuses_to_predict(new, "it is a discriminator", tmp_path, capsys)
    export(new, again)
    assert "It cannot fill masks before it is trained to" in capsys.readouterr().out
    refuses_to_predict(again, "it is a discriminator", tmp_path, capsys)
    convert("--from", "hf", again, "--output", third)
    capsys.readouterr()
    refuses_to_predict(third, "it is a discriminator", tmp_path, capsys)
    message = error_of([*arguments, str(tmp_path / "x"), "--generator-only"], capsys)
    assert "the generator cannot fill masks: it is a discriminator" in message


def refuses_to_predict(
    model: Path, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that neither ``fill-mask`` nor the perplexity of a text is computed."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n")
    assert why in error_of(["fill-mask", str(model), TEXT], capsys)
    arguments = ["evaluate", "perplexity", "--model", str(model), "--data", str(text)]
    assert why in error_of(arguments, capsys)


def test_an_encoder_is_imported_but_predicts_no_masks(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, pair = tmp_path / "new", tmp_path / "pair"
    with edited_tensors(out) as tensors:
        for name in [name for name in tensors if "lm_predictions" in name]:
            del tensors[name]
    convert("--from", "hf", out, "--output", new)
    with edited_tensors(out) as tensors:
        for name, shape in (("dense", (32, 32)), ("LayerNorm", (32,)), ("classifier", (1, 32))):
            tensors[f"mask_predictions.{name}.weight"] = torch.ones(shape)
            tensors[f"mask_predictions.{name}.bias"] = torch.ones(shape[0])
    convert("--from", "hf", out, "--new-generator", "--output", pair)
    capsys.readouterr()
    refuses_to_predict(new, "the file lacks lm_predictions", tmp_path, capsys)
    refuses_to_predict(pair, "its generator is new", tmp_path, capsys)


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        ("import", ["--to", "onnx", "--average", "2"], "--average is not for --to onnx of a"),
        ("import", ["--to", "onnx", "--seed", "0"], "--seed is not for --to onnx of a published"),
        ("import", ["--texts", "x"], "--texts is for --to onnx of a published model"),
        ("export", ["--texts", "x"], "--texts is for --to onnx of a published model"),
        ("export", ["--dtype", "all"], "--dtype all is for --to onnx of a published model"),
        ("import", ["--to", "hf"], "--to is for exports"),
        ("import", ["--dtype", "fp32"], "--dtype is for exports"),
        ("import", ["--form", "masked"], "--form is for exports"),
        ("import", ["--encoder"], "--encoder is for exports"),
        ("import", ["--no-timing"], "--no-timing is for exports"),
        ("import", ["--average", "2"], "--average is for exports"),
        ("import", ["--ema", "1"], "--ema is for exports"),
        ("import", ["--moving-average"], "--moving-average is for exports"),
        ("import", ["--data", "x"], "--data is for exports"),
        ("import", ["--every", "1"], "--every is for exports"),
        ("import", ["--generator-sha256", "0" * 64], "--generator-sha256 is for --generator"),
        ("export", ["--generator", "x"], "--generator is for imports (--from)"),
        ("export", ["--new-generator"], "--new-generator is for imports"),
        ("export", ["--generator-only"], "--generator-only is for imports"),
        ("export", ["--allow-pickle-weights-only"], "--allow-pickle-weights-only is for imports"),
        ("export", ["--sha256", "0" * 64], "--sha256 is for imports"),
        ("export", ["--seed", "0"], "--seed is for imports"),
        ("export", ["--every", "1", "--ema", "1"], "--ema excludes --every"),
        ("export", ["--average", "0"], "--average: 0 must be at least 1"),
        ("export", ["--moving-average", "--ema", "1"], "--moving-average excludes"),
        ("export", ["--encoder"], "--encoder is for --to onnx"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(
    mode: str,
    options: list[str],
    said: str,
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = ["--from", "hf", str(tmp_path)] if mode == "import" else ["--checkpoint", str(run_dir)]
    arguments = ["convert", *source, "--output", str(tmp_path / "out"), *options]
    assert said in error_of(arguments, capsys)
    assert not (tmp_path / "out").exists()


def test_a_name_on_the_hub_says_how_to_get_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    name = "microsoft/deberta-v3-base"
    for command in (["fill-mask", name, TEXT], ["convert", "--from", "hf", name, "--output", "x"]):
        message = error_of(command, capsys)
        assert "nothing is downloaded" in message
        assert f"hf download {name} --local-dir deberta-v3-base" in message


def test_a_mistyped_folder_is_not_taken_for_a_name_on_the_hub(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, meant in (("rnu", "; did you mean run?"), ("runs/first", "")):
        message = error_of(["fill-mask", name, TEXT], capsys)
        assert message.endswith(
            f"{name}: no such folder; give an export, a downloaded model, a run or a checkpoint"
            f"{meant}\n"
        )


def test_an_output_in_use_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    for source in (["--checkpoint", "none"], ["--from", "hf", "none"]):
        message = error_of(["convert", *source, "--output", str(tmp_path / "out")], capsys)
        assert f"{tmp_path / 'out'} exists and is not empty" in message


def test_an_output_that_is_being_written_is_refused_before_the_work(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with published_folder(out) as folder:
        (folder / "a").touch()
        for source in (["--checkpoint", "none"], ["--from", "hf", "none"]):
            message = error_of(["convert", *source, "--output", str(out)], capsys)
            assert f"{out} is being written by process {os.getpid()}" in message
        assert (folder / "a").exists()
        with pytest.raises(ConfigError, match="wait for it"), output_folder(out):
            raise AssertionError


def test_fill_mask_takes_as_many_tokens_as_there_are_positions(run_dir: Path) -> None:
    filler = open_filler(run_dir)
    assert filler.max_tokens
    masks = filler.max_tokens - 2  # without [CLS] and [SEP]
    assert len(filler.fill("[MASK]" * masks, 1)) == masks
    with pytest.raises(ConfigError, match="shorten it"):
        filler.fill("[MASK]" * (masks + 1), 1)


def test_fill_mask_refuses_in_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(run_dir)
    assert "no [MASK]" in error_of(["fill-mask", model, "The quick fox"], capsys)
    assert "shorten it" in error_of(["fill-mask", model, "[MASK] fox" * 99], capsys)
    assert "--top-k: 0 must be at least 1" in error_of(
        ["fill-mask", model, TEXT, "--top-k", "0"], capsys
    )
    assert "no such folder" in error_of(["fill-mask", model + "x", TEXT], capsys)
    (tmp_path / "weights.bin").touch()
    (tmp_path / "config.json").touch()
    message = error_of(["fill-mask", str(tmp_path), TEXT], capsys)
    assert f"import them first: megatron-deberta convert --from hf {tmp_path}" in message
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "config.json").unlink()
    assert "no committed checkpoint" in error_of(["fill-mask", str(tmp_path), TEXT], capsys)
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in error_of(["fill-mask", str(tmp_path), TEXT], capsys)


def test_export_refuses_in_one_line_and_leaves_nothing(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    out = str(tmp_path / "out")
    assert "either --checkpoint" in error_of(["convert", "--output", out], capsys)
    base = ["convert", "--output", out, "--checkpoint"]
    assert "no committed checkpoint" in error_of([*base, str(tmp_path / "tokenizer")], capsys)
    assert "no such folder; give the folder of a run" in error_of([*base, "rnu"], capsys)
    assert "has 2 checkpoints, not 3" in error_of([*base, str(run_dir), "--average", "3"], capsys)
    step = str(run_dir / "checkpoints" / "step_00000003")
    message = error_of([*base, step, "--average", "2"], capsys)
    assert "is no run with checkpoints; an average needs the run's folder" in message
    assert "contains no moving average" in error_of([*base, step, "--moving-average"], capsys)
    assert "exists and is not empty" in error_of(
        ["convert", "--checkpoint", str(run_dir), "--output", str(run_dir)], capsys
    )
    (file,) = (run_dir / "checkpoints" / "step_00000003").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "damaged" in error_of([*base, str(run_dir)], capsys)
    assert sorted(tmp_path.iterdir()) == before


def test_another_tokenizer_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer" / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary[20][1], vocabulary[21][1] = vocabulary[21][1] - 1, vocabulary[20][1]
    path.write_text(json.dumps(spec))
    arguments = ["convert", "--checkpoint", str(run_dir), "--output", str(tmp_path / "out")]
    assert "fingerprint" in error_of(arguments, capsys)
    missing = [*arguments, "--tokenizer", str(tmp_path / "nothing")]
    assert "--tokenizer" in error_of(missing, capsys)


def test_another_tokenizer_in_an_export_is_refused(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command that reads it; exports of earlier releases, without a record, load."""
    fill = ["fill-mask", str(out), TEXT]
    tiny_tokenizer().save(str(tmp_path / "tokenizer"))
    assert main(fill) == 0
    # transformers writes the file anew.
    AutoTokenizer.from_pretrained(out).save_pretrained(out)
    assert main(fill) == 0
    capsys.readouterr()
    path = out / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary[20], vocabulary[21] = vocabulary[21], vocabulary[20]
    path.write_text(json.dumps(spec))
    said = f"tokenizer {out} is not the one that the model was exported with (tokenizer_fingerp"
    assert said in error_of(fill, capsys)
    imported = ["convert", "--from", "hf", str(out), "--output", str(tmp_path / "new")]
    assert said in error_of(imported, capsys)
    source = open_source_model(out)
    with pytest.raises(DataError, match="is not the one that the model was exported with"):
        source.load_tokenizer()
    model = with_task_head(source.config, "classification", ("good", "bad"), 0.0)
    config = RunConfig(model=model, tokenizer=TokenizerConfig(path=str(out)))
    with pytest.raises(DataError, match="is not the one that the model was exported with"):
        open_release_weights(out, config)
    assert main([*fill, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert open_source_model(out, str(tmp_path / "tokenizer")).load_tokenizer()
    fields = json.loads((out / "config.json").read_text())
    del fields["tokenizer_fingerprints"]
    (out / "config.json").write_text(json.dumps(fields))
    assert main(fill) == 0
    assert open_source_model(out).load_tokenizer()


def test_another_sentencepiece_model_in_an_export_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though ``tokenizer.json`` is read first: other programs read this one."""
    load_tokenizer(str(UNIGRAM)).save(str(tmp_path / "tokenizer"))
    fields = tokenizer_fields(*[load_tokenizer(str(tmp_path / "tokenizer"))] * 2)
    load_export_tokenizer(fields, tmp_path / "tokenizer")
    with (tmp_path / "tokenizer" / "spm.model").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match=r"exported with \(sentencepiece_sha256 in its config.json"):
        load_export_tokenizer(fields, tmp_path / "tokenizer")


@pytest.mark.parametrize("head", ["spans", "tokens", "classification"])
def test_offsets_of_tags_and_answers_begin_with_a_letter(head: Any, tmp_path: Path) -> None:
    """Also those of a lone space before a word, which is a piece of its own."""
    labels = () if head == "spans" else ("O", "B-X")
    text = "Zz in 1848 (the 7th) 東京"
    tokenizer = load_tokenizer(str(UNIGRAM))
    export_module._save_tokenizer(tokenizer, tmp_path, with_task_head(V2, head, labels, 0.0))
    ids = tokenizer.encode(text)
    found = AutoTokenizer.from_pretrained(tmp_path)(text, return_offsets_mapping=True)
    assert found["input_ids"][1:-1] == ids
    spans = found["offset_mapping"][1:-1]
    assert [tokenizer.piece(token) for token in ids].count("▁") > 1
    assert any(text[start].isspace() for start, _ in spans) == (head == "classification")


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(replace(V2, vocab_size=60), tmp_path / "run", tmp_path / "tokenizer")
    arguments = [
        "convert",
        "--checkpoint",
        str(tmp_path / "run"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert "73 ids, the model 60 rows" in error_of(arguments, capsys)


def test_import_then_export_gives_the_same_files(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, new = exported, tmp_path / "second", tmp_path / "new"
    convert("--from", "hf", first, "--output", new)
    output = capsys.readouterr().out
    assert f"{new}/checkpoints/step_00000000: weights of {first}" in output
    export(new, second)
    names, again = (
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        for folder in (first, second)
    )
    assert names == again
    assert "1_Pooling/config.json" in names
    names.remove("README.md")  # with the name of the model, and its training
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_imported_run_file_starts_from_the_weights(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    with edited_tensors(out) as tensors:
        del tensors["deberta.embeddings.position_embeddings.weight"]
    convert("--from", "microsoft", out, "--output", new)
    output = capsys.readouterr().out
    assert "newly initialised: mask_decoder.position.weight" in output
    config = load_config(new / "run.yaml", ["data.train=[x]"])
    assert config.model == V2
    reader = CheckpointReader(config.checkpoint.load_from)
    assert reader.kinds == ("weight",)
    assert reader.shapes == parameter_shapes(V2)
    assert Path(config.tokenizer.path) == new / "tokenizer"
    assert reader.metadata.tokenizer_fingerprint == tiny_tokenizer().fingerprint


def test_import_refuses_in_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer().save(str(tmp_path / "in"))
    arguments = ["convert", "--output", str(tmp_path / "new"), "--from"]
    assert "hf or microsoft" in error_of([*arguments, "google", str(tmp_path)], capsys)
    assert "add one" in error_of([*arguments, "hf", str(tmp_path / "in")], capsys)
    assert "no such folder" in error_of([*arguments, "hf", str(tmp_path / "nothing")], capsys)
    (tmp_path / "in" / "empty").mkdir()
    assert "has no config.json" in error_of([*arguments, "hf", str(tmp_path / "in/empty")], capsys)
    (tmp_path / "in" / "empty" / "config.json").write_text("{}")
    assert "--tokenizer" in error_of([*arguments, "hf", str(tmp_path / "in/empty")], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("sharing", ["gdes", "es", "none"])
def test_replaced_token_detection_is_exported_as_encoder_and_generator(
    sharing: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(V2, head="rtd", embedding_sharing=sharing, generator_layers=2)
    save_run(config, tmp_path / "run", tmp_path / "tokenizer")
    weights = random_weights(config, seed=3)
    out = tmp_path / "out"
    export(tmp_path / "run", out)
    assert f"fill-mask {out / 'generator'}" in capsys.readouterr().out
    table = weights["generator.embeddings.token.weight"]
    tensors = load_file(out / "model.safetensors")
    own = {
        "gdes": lambda: table + weights["discriminator.embeddings.token.delta.weight"],
        "es": lambda: table,
        "none": lambda: weights["discriminator.embeddings.token.weight"],
    }[sharing]()
    assert torch.equal(tensors["deberta.embeddings.word_embeddings.weight"], own)
    head = weights["discriminator.head.classifier.weight"]
    assert torch.equal(tensors["mask_predictions.classifier.weight"], head)
    encoder = load_pretrained(AutoModel, out)
    assert type(encoder).__name__ == "DebertaV2Model"
    assert encoder.config.num_hidden_layers == V2.num_layers
    assert fill(capsys, tmp_path / "run", TEXT) == fill(capsys, out / "generator", TEXT)
    assert "random weights" in error_of(["fill-mask", str(out), TEXT], capsys)
    assert_pair_is_imported(config, weights, out, tmp_path / "new")


def assert_pair_is_imported(
    config: ModelConfig, weights: dict[str, Tensor], exported: Path, new: Path
) -> None:
    """Import both models of an export; the discriminator's table is kept, as generator + delta."""
    convert("--from", "hf", exported, "--generator", exported / "generator", "--output", new)
    run = load_config(new / "run.yaml", ["data.train=[x]"])
    assert run.model == replace(config, embedding_sharing="gdes")
    assert (run.objective.name, run.objective.mask_token_probability) == ("rtd", 1.0)
    reader = CheckpointReader(run.checkpoint.load_from)
    assert reader.shapes == parameter_shapes(run.model)
    delta = "discriminator.embeddings.token.delta.weight"
    for name in reader.shapes:
        if name != delta:
            assert torch.equal(reader.tensor(name), weights[name]), name
    table = open_part(reader, run.model, "discriminator")[1].tensor("embeddings.token.weight")
    expected = load_file(exported / "model.safetensors")
    torch.testing.assert_close(
        table, expected["deberta.embeddings.word_embeddings.weight"], rtol=0, atol=1e-7
    )


def test_models_of_two_releases_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, heads in (("one", 4), ("two", 2)):
        save_run(replace(V2, head="rtd", num_heads=heads), tmp_path / name, tmp_path / "tokenizer")
        export(tmp_path / name, tmp_path / f"{name}_hf")
    capsys.readouterr()
    models = ["--from", "hf", str(tmp_path / "one_hf")]
    models += ["--generator", str(tmp_path / "two_hf" / "generator")]
    error = error_of(["convert", *models, "--output", str(tmp_path / "new")], capsys)
    assert "the generator has num_heads=2, the discriminator 4" in error
    assert not (tmp_path / "new").exists()


def test_a_model_without_generator_beside_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_release(tmp_path / "v3", "v3", generator=False)
    folder, new = str(tmp_path / "v3"), str(tmp_path / "new")
    arguments = ["convert", "--from", "hf", folder, "--output", new, "--generator", folder]
    message = error_of(arguments, capsys)
    assert "has no generator_config.json, so no generator; download it, or use --new-gen" in message
    assert "give one of them" in error_of([*arguments, "--new-generator"], capsys)
    assert not (tmp_path / "new").exists()


def test_released_spelling_of_the_discriminator(tmp_path: Path) -> None:
    """The released code writes ``classifer``, keeps the delta, and a vocabulary head it ignores."""
    config = replace(V2, head="rtd")
    save_run(config, tmp_path / "run", tmp_path / "tokenizer")
    out, new = tmp_path / "out", tmp_path / "new"
    export(tmp_path / "run", out)
    for folder in (out, out / "generator"):
        fields = json.loads((folder / "config.json").read_text())
        own = ("model_type", "mask_decoder_passes", "absolute_positions", "replaced_token_head")
        released = {name: value for name, value in fields.items() if name not in own}
        write_json(folder / "config.json", released)
    with edited_tensors(out) as tensors:
        for kind in ("weight", "bias"):
            value = tensors.pop(f"mask_predictions.classifier.{kind}")
            tensors[f"mask_predictions.classifer.{kind}"] = value
        table = tensors["deberta.embeddings.word_embeddings.weight"]
        tensors["deberta.embeddings.word_embeddings._weight"] = torch.zeros_like(table)
        tensors["deberta.embeddings.position_embeddings.weight"] = torch.zeros(96, 32)
        tensors["lm_predictions.lm_head.bias"] = torch.zeros(208)
    convert("--from", "microsoft", out, "--generator", out / "generator", "--output", new)
    weights = random_weights(config, seed=3)
    reader = CheckpointReader(
        load_config(new / "run.yaml", ["data.train=[x]"]).checkpoint.load_from
    )
    assert reader.shapes.keys() == weights.keys()
    for name, expected in weights.items():
        torch.testing.assert_close(reader.tensor(name), expected, rtol=0, atol=1e-7, msg=name)


def test_the_graphs_of_a_published_model_say_how_they_are_loaded() -> None:
    session = 'onnxruntime.InferenceSession("out/onnx/model.onnx")'
    lines = _graph_usage("out", "tokens", ["model.onnx"])
    assert lines[0].endswith(session)
    assert lines[1].endswith('model = ORTModelForTokenClassification.from_pretrained("out")')
    assert len(_graph_usage("out", "fill-mask", ["model.onnx"])) == 1
    assert len(_graph_usage("out", "tokens", ["model.onnx", "model_fp16.onnx"])) == 2


def test_texts_that_are_missing_are_named_once() -> None:
    with pytest.raises(DataError) as error:
        _read_texts("nope.txt")
    assert str(error.value) == "--texts nope.txt cannot be read: No such file or directory"
