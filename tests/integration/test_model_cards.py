"""A model card of every kind of export; its figures are recomputed from the exported weights."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.store import find_newest
from megatron_deberta.cli.main import main
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.build import open_corpora, validation_loader
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.evaluate.predict import open_predictor
from megatron_deberta.hf import MegatronDebertaForMaskedLM
from megatron_deberta.hf.loading import (
    build_with_head,
    load_pretrained,
    open_trained_model,
)
from megatron_deberta.hf.modeling_megatron_deberta import MegatronDebertaForCausalLM
from megatron_deberta.model import RuntimeOptions
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.rtd import ReplacedTokenModel
from megatron_deberta.tasks.reading import split_to_predict
from megatron_deberta.tasks.scoring import score
from megatron_deberta.tokenizer import load_tokenizer
from tests.support.selection import every
from tests.support.tiny_runs import export_run
from tests.support.tiny_task import MODEL, WORDS

GOLDEN = MODEL.parent
SHARD = GOLDEN / "shards" / "docs_text_document"
STEPS = 4
TINY = (
    "train.global_batch_size=4", "train.micro_batch_size=2", "train.eval_batches=2",
    "train.device=cpu", "parallel.engine=plain", "log.tensorboard=false", "log.samples=0",
    "data.num_workers=0", "optimizer.learning_rate=5e-3", "optimizer.warmup_steps=1",
    "optimizer.warmup_fraction=null",
)  # fmt: skip
RUN = """
model: {num_layers: 2, hidden_size: 16, num_heads: 2, ffn_hidden_size: 32, vocab_size: 304,
  max_position_embeddings: 32, max_relative_positions: 16, position_buckets: 4}
"""
PRETRAIN = (
    *TINY, f"train.steps={STEPS}", "train.eval_every=null", "objective.mask_probability=0.25",
    f"data.train=[{SHARD}]", "data.validation_fraction=0.3", "data.sequence_length=24",
    f"tokenizer.path={GOLDEN / 'tokenizer'}",
)  # fmt: skip
KINDS: dict[str, tuple[str, ...]] = {
    "mlm": ("optimizer.ema_decay=0.5", "checkpoint.save_every=3", "train.eval_every=2"),
    "rtd": ("model.head=rtd", "objective.name=rtd", "objective.mask_token_probability=1",
            "objective.random_token_probability=0", "objective.mask_probability=0.9"),
    "mlm+ar": ("objective.name=mlm+ar",),
    "autoregressive": ("model.head=autoregressive", "objective.name=autoregressive"),
}  # fmt: skip
HEADS = (
    "classification", "multilabel", "regression", "tokens", "spans", "choices", "rerank"
)  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "multilabel": {"labels": ["a", "b"]},
    "classification": {"labels": ["bad", "good"]},
    "tokens": {"labels": ["O", "B-X", "I-X"]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cards")


def pretrained(runs: Path, kind: str) -> Path:
    """Return a tiny run of this kind, which the first caller trains."""
    folder = runs / f"{kind}-run"
    if not folder.exists():
        config = runs / "run.yaml"
        config.write_text(RUN)
        for path in SHARD.parent.glob(f"{SHARD.name}.*"):
            shutil.copy(path, runs / path.name.replace("docs", "other"))
        arguments = [*PRETRAIN, *KINDS[kind], f"train.run_dir={folder}"]
        if kind == "autoregressive":
            arguments.append(f"data.validation=[{runs / 'other_text_document'}]")
        assert main(["pretrain", str(config), *arguments]) == 0
    return folder


def exported(run: Path, *options: str) -> Path:
    name = "-".join([run.name, *[option.strip("-") for option in options]])
    return export_run(run, run.parent / f"{name}-hf", *options)


def read_card(folder: Path) -> tuple[str, dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return a card's text, its metadata, and its tables' rows by their first cell."""
    text = (folder / "README.md").read_text()
    rows = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    cells = [tuple(row.split(" | ")) for row in rows]
    return text, yaml.safe_load(text.split("---\n")[1]), {row[0]: row[1:] for row in cells}


def metrics_of(metadata: dict[str, Any]) -> dict[str, float]:
    (result,) = metadata["model-index"][0]["results"]
    return {each["type"]: each["value"] for each in result["metrics"]}


def validation_batches(run: Path) -> tuple[RunConfig, Iterator[Batch]]:
    config = load_config(run / "config.yaml")
    vocabulary = Vocabulary.of(load_tokenizer(config.tokenizer.path))
    corpora = open_corpora(config, vocabulary, hashes=False)
    loader = validation_loader(config, vocabulary, 0, 1, corpora)
    assert loader is not None
    return config, iter(loader)


def scored(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return mean cross-entropy and accuracy."""
    losses = -logits.double().log_softmax(-1)[torch.arange(len(labels)), labels]
    return float(losses.mean()), float((logits.argmax(-1) == labels).double().mean())


def masked_figures(folder: Path, run: Path, form: str) -> dict[str, float]:
    """Recompute loss and accuracy with the exported model in transformers."""
    model_class = (
        MegatronDebertaForCausalLM if form == "autoregressive" else MegatronDebertaForMaskedLM
    )
    logits, labels = [], []
    with torch.no_grad():
        model = load_pretrained(model_class, folder)
        for batch in validation_batches(run)[1]:
            if batch.inputs.causal != (form == "autoregressive"):
                continue
            out = model(
                input_ids=batch.inputs.input_ids, attention_mask=batch.inputs.is_token.long()
            )
            for row, (places, right) in enumerate(
                zip(batch.masked_positions, batch.labels, strict=True)
            ):
                logits.append(out.logits[row, places[places >= 0]])
                labels.append(right[places >= 0])
    loss, accuracy = scored(torch.cat(logits), torch.cat(labels))
    return {"loss": loss, "accuracy": accuracy, "count": sum(map(len, labels))}


def check_origin(text: str, rows: dict[str, tuple[str, ...]]) -> None:
    """Check what every card says of the training, and that it names nothing of this machine."""
    assert str(GOLDEN.parents[2]) not in text
    assert "/" not in text[text.index("## Training") : text.index("## Use")]
    assert rows["hardware"][0] == "1 rank (1 tensor-parallel x 1 data-parallel), CPU"
    assert rows["number format"] == ("fp32",)
    assert "fingerprint" in rows["tokenizer"][0]
    assert "license: unknown" in text
    assert "Not evaluated: " in text


def check_figures(folder: Path, run: Path, form: str) -> tuple[str, dict[str, Any], Any, float]:
    """Compare a card with the export's figures; return its text, metadata, rows, and targets."""
    text, metadata, rows = read_card(folder)
    check_origin(text, rows)
    found = masked_figures(folder, run, form)
    unit, key, shown = (
        ("predicted", "accuracy", "accuracy of next tokens") if form == "autoregressive"
        else ("masked", "masked_accuracy", "masked accuracy")
    )  # fmt: skip
    assert float(rows[f"loss, nats per {unit} token"][0]) == pytest.approx(found["loss"], abs=1e-3)
    assert float(rows["perplexity"][0]) == pytest.approx(math.exp(found["loss"]), rel=1e-3)
    assert float(rows[shown][0]) == pytest.approx(found["accuracy"], abs=1e-4)
    assert metrics_of(metadata) == {
        "perplexity": pytest.approx(math.exp(found["loss"]), rel=1e-3),
        key: pytest.approx(found["accuracy"], abs=1e-4),
    }
    return text, metadata, rows, found["count"]


@pytest.mark.parametrize("kind", ["mlm", "autoregressive", "rtd"])
def test_figures_of_a_language_model_are_those_of_the_export(kind: str, runs: Path) -> None:
    """Of replaced-token detection: the generator."""
    run = pretrained(runs, kind)
    folder = exported(run) / "generator" if kind == "rtd" else exported(run)
    form = "autoregressive" if kind == "autoregressive" else "masked"
    text, metadata, rows, count = check_figures(folder, run, form)
    unit = "predicted" if form == "autoregressive" else "masked"
    assert rows[f"{unit} tokens"][0] == f"{count:,}"
    baseline = float(rows[f"loss, nats per {unit} token"][1])
    assert float(rows["perplexity"][1]) == pytest.approx(math.exp(baseline), rel=1e-3)
    recorded = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert baseline == pytest.approx(recorded["unigram_loss"], abs=1e-4)
    assert "| figure | value | baseline: frequencies of the training tokens |" in text
    data, held_out = (
        (SHARD.name, f"documents held out of {SHARD.name} (0.3)") if form == "masked"
        else ("other_text_document",) * 2
    )  # fmt: skip
    assert f"on {held_out}: rows of 24 tokens" in text
    result = metadata["model-index"][0]["results"][0]["dataset"]
    assert result == {"name": data, "type": data, "split": "validation"}
    assert rows["tokens"] == (f"{STEPS * 4 * 24:,}, padding included",)
    assert rows["data"] == (SHARD.name,)
    assert ("masking" in rows) == (form == "masked")
    if form == "masked":
        probability = "0.9" if kind == "rtd" else "0.25"
        assert rows["masking"][0].startswith(f"{probability} of the tokens, in spans of up to 3")
        assert f", {probability} of the tokens masked." in text


@pytest.mark.parametrize("form", ["masked", "autoregressive"])
def test_each_form_has_its_own_figures(form: str, runs: Path) -> None:
    run = pretrained(runs, "mlm+ar")
    text, _, rows, _ = check_figures(exported(run, "--form", form), run, form)
    # The unigram baseline is that of the masked form.
    assert ("baseline" in text) == (form == "masked")
    assert f"0.5 of the steps; exported in the {form} form" in rows["objective"][0]


def test_figures_of_a_discriminator(runs: Path) -> None:
    run = pretrained(runs, "rtd")
    folder = exported(run) if not (runs / "rtd-run-hf").exists() else runs / "rtd-run-hf"
    text, metadata, rows = read_card(folder)
    check_origin(text, rows)
    config, batches = validation_batches(run)
    step = find_newest(run)
    assert step is not None
    reader = CheckpointReader(step)
    model = build_objective(config).build_model(RuntimeOptions())
    assert isinstance(model, ReplacedTokenModel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reader.tensor(name))
    trained = open_trained_model(run)
    part, weights = trained.open("discriminator")
    # The exported weights, with the head's names of the file.
    tensors = load_file(folder / "model.safetensors")
    table = tensors["deberta.embeddings.word_embeddings.weight"]
    assert torch.equal(weights("embeddings.token.weight"), table)
    discriminator = build_with_head(part, weights)
    said, truth = [], []
    with torch.no_grad():
        for batch in batches:
            drawn = model.eval().generate(batch, None).outputs
            assert drawn is not None
            ids, right = batch.inputs.input_ids.clone(), batch.inputs.input_ids.clone()
            for row, places in enumerate(batch.masked_positions):
                known = places >= 0
                ids[row, places[known]] = drawn[row, known]
                right[row, places[known]] = batch.labels[row, known]
            logits = discriminator(replace(batch.inputs, input_ids=ids))
            real = batch.inputs.is_token
            said.append(logits[real])
            truth.append((ids != right)[real])
    logits, is_replaced = torch.cat(said).double(), torch.cat(truth)
    hits = (logits > 0) & is_replaced
    share = float(is_replaced.double().mean())
    expected = {
        "accuracy": float(((logits > 0) == is_replaced).double().mean()),
        "precision": int(hits.sum()) / max(int((logits > 0).sum()), 1),
        "recall": int(hits.sum()) / int(is_replaced.sum()),
        "f1": 2 * int(hits.sum()) / int((logits > 0).sum() + is_replaced.sum()),
    }
    assert metrics_of(metadata) == {k: pytest.approx(v, abs=2e-5) for k, v in expected.items()}
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, is_replaced.double())
    assert float(rows["loss, nats per token"][0]) == pytest.approx(float(loss), abs=1e-3)
    assert 0 < share < 1
    assert expected["f1"] > 0
    assert float(rows["share of replaced tokens"][0]) == pytest.approx(share, abs=1e-4)
    assert float(rows["accuracy"][1]) == pytest.approx(1 - share, abs=1e-4)
    assert rows["F1 of replaced tokens"][1] == "0.0000"
    assert "baseline: no token is replaced" in text
    assert f"every token is replaced would have an F1 of {2 * share / (1 + share):.4f}" in text
    assert "masked accuracy" not in text
    assert "perplexity" not in text


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (("--average", "2"), "mean of the checkpoints of steps 3, 4"),
        (("--ema", "0.5"),
         "exponential moving average (decay 0.5) of the checkpoints of steps 3, 4"),
        (("--moving-average",),
         "moving average of the weights over updates (decay 0.5) at step 4"),
    ],
)  # fmt: skip
def test_averaged_weights_have_no_figures(
    options: tuple[str, ...], weights: str, runs: Path
) -> None:
    folder = exported(pretrained(runs, "mlm"), *options)
    text, metadata, rows = read_card(folder)
    check_origin(text, rows)
    assert rows["weights"] == (weights,)
    assert "model-index" not in metadata
    assert f"These weights were not evaluated: they are the {weights}" in text
    assert not [name for name in rows if "accuracy" in name or "loss" in name]


def test_the_mean_of_one_checkpoint_is_that_checkpoint(runs: Path) -> None:
    folder = exported(pretrained(runs, "mlm"), "--average", "1")
    _, metadata, rows = read_card(folder)
    assert rows["weights"] == ("of step 4",)
    assert "model-index" in metadata


def test_a_step_without_validation_has_no_figures(runs: Path) -> None:
    """The run saved step 3, and validated at steps 2 and 4."""
    run = pretrained(runs, "mlm")
    folder = runs / "step3-hf"
    step = run / "checkpoints" / "step_00000003"
    export_run(step, folder)
    text, metadata, rows = read_card(folder)
    assert rows["optimizer steps"] == ("3 of 4",)
    assert rows["tokens"] == (f"{3 * 4 * 24:,}, padding included",)
    assert "model-index" not in metadata
    why = "the run has no validation at step 3; its last validation before was at step 2."
    assert f"not evaluated: {why}" in " ".join(text.split())


def test_a_validation_on_other_data_than_the_checkpoint_records_has_no_figures(
    runs: Path, tmp_path: Path
) -> None:
    """The process was stopped before it, and started again with other data.validation."""
    shutil.copytree(pretrained(runs, "autoregressive"), tmp_path / "run")
    parts = [str(SHARD), str(runs / "other_text_document")]
    assert main(["merge", *parts, "--output", str(tmp_path / "twice")]) == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    (tmp_path / "run.yaml").write_text(RUN)

    def start_again(*more: str) -> str:
        again = [*PRETRAIN, *KINDS["autoregressive"], f"train.run_dir={tmp_path / 'run'}", *more]
        other = f"data.validation=[{tmp_path / 'twice'}]"
        assert main(["pretrain", str(tmp_path / "run.yaml"), *again, other]) == 0
        shutil.rmtree(tmp_path / "run-hf", ignore_errors=True)
        return read_card(exported(tmp_path / "run"))[0]

    # Only after the validation.
    assert "on other_text_document: rows of 24 tokens." in start_again()
    metrics.write_text("".join(line for line in lines if '"accuracy"' not in line))
    text = start_again()
    assert metrics.read_text().count('"accuracy"') == 1
    assert "the validation at step 4 was on other data than the checkpoint records." in text
    assert "model-index" not in text


def test_an_imported_model_has_no_figures(tmp_path: Path) -> None:
    new, folder = tmp_path / "new", tmp_path / "out"
    assert main(["convert", "--from", "hf", str(MODEL), "--output", str(new)]) == 0
    export_run(new, folder)
    text, metadata, rows = read_card(folder)
    assert rows["training"] == ("imported weights; their training is not recorded",)
    assert "pretrained by" not in text
    assert str(tmp_path) not in text
    assert "model-index" not in metadata


def task_rows(head: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(10):
        words = WORDS[number : number + 4]
        text = " ".join(words)
        rows.append(
            {
                "classification": {"text": text, "label": "good" if number % 3 else "bad"},
                "multilabel": {"text": text, "labels": "a,b" if number % 3 else "b"},
                "regression": {"text": text, "score": number / 3},
                "tokens": {"tokens": words, "tags": ["B-X" if len(w) > 2 else "O" for w in words]},
                "spans": {"question": "who", "context": text, "answer": words[number % 2],
                          "answer_start": text.index(words[number % 2])},
                "choices": {"passage": text, "question": "is it",
                            "choices": ["cat", "dog", "run"][: 2 + number % 2],
                            "label": number % 2},
                "rerank": {"query": words[0], "passages": [text, "no", "cat"][: 2 + number % 2],
                           "labels": [1, 0, 0.5][: 2 + number % 2]},
            }[head]
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("head", every(3, HEADS))
def test_figures_of_a_fine_tuned_model(
    head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    rows_of = task_rows(head)
    for split, part in (("train", rows_of), ("dev", list(itertools.chain(rows_of[3:], rows_of)))):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    task = tmp_path / "task.yaml"
    base = f"configs/tasks/custom_{head}.yaml"
    values = {"base": base, "name": f"own_{head}", "max_length": 32, "stride": 4}
    task.write_text(json.dumps(values | TASKS.get(head, {})))
    settings = [*TINY, "train.steps=3", f"train.run_dir={run}", "model.head_dropout=0"]
    common = [str(task), "--data", str(data)]
    assert main(["finetune", *common, "--model", str(MODEL), "--settings", "none", *settings]) == 0
    folder = exported(run)
    text, metadata, rows = read_card(folder)
    check_origin(text, rows)
    assert rows["data"] == (f"own_{head}",)
    assert rows["initial weights"] == ("hf",)
    assert rows["optimizer steps"] == ("3",)
    constants = {"regression": "always the mean score", "rerank": "mean of random orders"}
    constant = constants.get(head, "always the most frequent label")
    assert (f"| baseline: {constant} |" in text) == (head != "spans")
    assert "on the split `dev` of own_" in text
    with open_predictor(str(task), folder, str(data), ("train.device=cpu",)) as predictor:
        split, outputs, loss = predictor.run("dev")
        config = predictor.task
        expected = score(config, split.examples, split.encoded, outputs)
    found = metrics_of(metadata)
    assert found == {name: pytest.approx(expected[name], abs=1e-5) for name in config.metrics}
    assert float(rows["loss, mean per labelled target"][0]) == pytest.approx(loss, abs=2e-4)
    result = metadata["model-index"][0]["results"][0]["dataset"]
    assert result == {"name": f"own_{head}", "type": f"own_{head}", "split": "dev"}
    check_baseline(head, rows)
    # Where no test split exists, the suggested commands name dev.
    assert main(["fill-mask", str(run), "A [MASK]."]) == 2
    assert main(["fill-mask", str(folder), "A [MASK]."]) == 2
    captured = capsys.readouterr()
    assert captured.err.count(f"is fine-tuned with the head {head} and fills no masks") == 2
    assert captured.out.count(f"--data {data} --split dev") == 2
    assert split_to_predict(str(task), data) == "dev"
    (data / "test.jsonl").touch()
    assert split_to_predict(str(task), data) == "test"
    assert split_to_predict(str(tmp_path / "moved.yaml"), data) == "test"


def check_baseline(head: str, rows: dict[str, tuple[str, ...]]) -> None:
    """Of the 17 examples of dev, by hand: those with the most frequent label of train."""
    dev = [*range(3, 10), *range(10)]
    if head == "classification":
        assert rows["accuracy"][1] == f"{sum(n % 3 > 0 for n in dev) / 17:.4f}"
    elif head == "multilabel":
        # Of two labels, b is one of all examples; a, of those that are no multiple of 3.
        both = sum(n % 3 > 0 for n in dev)
        assert rows["micro f1"][1] == f"{2 * 17 / (2 * 17 + both):.4f}"
        assert rows["accuracy"][1] == f"{(17 - both) / 17:.4f}"
    elif head == "choices":
        assert rows["accuracy"][1] == f"{sum(n % 2 == 0 for n in dev) / 17:.4f}"
    elif head == "regression":
        assert rows["pearson"][1] == "0.0000"
    elif head == "tokens":
        words = [word for n in dev for word in WORDS[n : n + 4]]
        assert rows["accuracy"][1] == f"{sum(len(w) > 2 for w in words) / len(words):.4f}"
    elif head == "rerank":
        # Means over the orders of two passages, one of them relevant, and of three, two of them.
        assert rows["mrr at 10"][1] == f"{sum(5 / 6 if n % 2 else 3 / 4 for n in dev) / 17:.4f}"
    else:
        assert len(rows["f1"]) == 1
