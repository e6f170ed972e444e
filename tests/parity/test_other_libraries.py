"""Exports open in sentence-transformers, PEFT and pipelines, and suit text-embeddings-inference."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from megatron_deberta.cli.main import main
from megatron_deberta.config.schema import Head, RunConfig, with_task_head
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.evaluate.zero_shot import for_task
from megatron_deberta.hf.export_model import export_model
from megatron_deberta.hf.loading import build_model
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.tasks import load_task
from tests.support.tiny_models import TEXT, V2, random_weights, reader, tiny_tokenizer

ENCODE = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu", trust_remote_code=True)
print(json.dumps(model.encode(sys.argv[2:]).tolist()))
"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of a pretrained model."""
    output = tmp_path_factory.mktemp("pretrained") / "model"
    export_model(V2, reader(random_weights(V2)), tiny_tokenizer(), output)
    return output


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of a fine-tuned model."""
    output = tmp_path_factory.mktemp("fine_tuned") / "model"
    config = with_task_head(V2, "classification", ("no", "yes"))
    export_model(config, reader(random_weights(config)), tiny_tokenizer(), output)
    return output


def test_sentence_transformers_encodes_with_mean_pooling(encoder: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(encoder), device="cpu")
    found = torch.from_numpy(model.encode(list(TEXT)))

    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    batch = tokenizer(list(TEXT), padding=True, return_tensors="pt")
    stock = transformers.AutoModel.from_pretrained(encoder).eval()
    with torch.no_grad():
        states = stock(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    expected = (states * mask).sum(1) / mask.sum(1)
    assert not mask.all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert model.get_max_seq_length() == V2.max_position_embeddings


QUERY, PASSAGES = TEXT[0][:30], [TEXT[1][:40], TEXT[3][:50], TEXT[2][:20]]


def exported(folder: Path, head: Head, labels: tuple[str, ...] = (), **options: Any) -> Path:
    config = with_task_head(V2, head, labels)
    export_model(config, reader(random_weights(config)), tiny_tokenizer(), folder, **options)
    return folder


def written_predictions(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capfd.readouterr()
    assert main(["predict", *arguments, "train.device=cpu"]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


@pytest.mark.parametrize("loss", ["bce", "ranknet"])
def test_a_cross_encoder_ranks_as_we_do(
    loss: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder = exported(tmp_path / "m", "rerank", ranking_loss=loss)
    encoder = library.CrossEncoder(str(folder), device="cpu")
    assert type(encoder.activation_fn).__name__ == ("Sigmoid" if loss == "bce" else "Identity")
    expected = encoder.predict([(QUERY, passage) for passage in PASSAGES]).tolist()
    pairs = [part for passage in PASSAGES for part in ("--text-pair", passage)]
    (found,) = written_predictions(capfd, "--model", str(folder), "--text", QUERY, *pairs)
    assert found["passages"] == PASSAGES
    assert found["scores"] == pytest.approx(expected, abs=1e-5)
    ranked = [hit["corpus_id"] for hit in encoder.rank(QUERY, PASSAGES)]
    assert [found["ranks"][passage] for passage in ranked] == [1, 2, 3]


def test_published_scores_are_those_of_passages_or_of_a_regression(tmp_path: Path) -> None:
    """A published model with one label gets the head of the task, regression or rerank."""
    folder = exported(tmp_path / "m", "regression")
    tasks = {head: load_task(f"custom_{head}") for head in ("regression", "rerank")}
    assert open_source_model(folder).config.head == "regression"
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    assert fields.pop("problem_type") == "regression"
    for activation, is_sigmoid in (("activation.Sigmoid", True), ("linear.Identity", False)):
        added = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{activation}"}}
        for problem_type in ({"problem_type": "regression"}, {}):
            path.write_text(json.dumps(fields | added | problem_type))
            source = open_source_model(folder)
            assert source.config.head == ("regression" if problem_type else "rerank")
            for head, task in tasks.items():
                found = for_task(source, task, None)
                assert found.config.head == head
                assert found.uses_sigmoid == (is_sigmoid and head == "rerank")
    # Our own regression is trained on scores, not on their probabilities.
    path.write_text(json.dumps({**fields, "problem_type": "regression"}))
    own = replace(open_source_model(folder), run=RunConfig(), fields={})
    assert not for_task(own, tasks["rerank"], None).uses_sigmoid


NLI = ("contradiction", "neutral", "entailment")
LABELS = ["river", "children", "sun"]


@pytest.mark.parametrize(
    ("classes", "labels", "is_multi"),
    [
        (NLI, LABELS, False),
        (NLI, LABELS, True),
        (NLI, LABELS[:1], False),
        (("Entailment", "not_entailment"), LABELS, True),
    ],
)
def test_zero_shot_classification_is_that_of_the_pipeline(
    classes: tuple[str, ...],
    labels: list[str],
    is_multi: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, hypothesis = exported(tmp_path / "m", "classification", classes), "It is about {}."
    pipeline = transformers.pipeline("zero-shot-classification", model=str(folder), device="cpu")
    # The last one is longer than the model's rows.
    texts = [TEXT[0], TEXT[3], " ".join(TEXT)]
    assert len(tiny_tokenizer().encode(texts[-1])) > V2.max_position_embeddings
    options = ["--multi-label"] if is_multi else []
    given = [part for text in texts for part in ("--text", text)]
    found = written_predictions(
        capfd, "--model", str(folder), *given, "--hypothesis", hypothesis, *options,
        "--zero-shot", *labels, "--tokenizer", str(folder),
    )  # fmt: skip
    for ours, text in zip(found, texts, strict=True):
        theirs = pipeline(text, labels, hypothesis_template=hypothesis, multi_label=is_multi)
        scores = dict(zip(theirs["labels"], theirs["scores"], strict=True))
        assert ours["scores"] == pytest.approx(scores, abs=1e-5)
        assert ours["label"] == theirs["labels"][0]
    assert len({tuple(ours["scores"].values()) for ours in found}) == 3


def test_a_labelled_set_is_scored_without_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, task = exported(tmp_path / "m", "classification", NLI), load_task("sst2_zero_shot")
    rows = [(text, number % 2) for number, text in enumerate(TEXT)]
    lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]
    (tmp_path / "dev.tsv").write_text("\n".join(lines) + "\n")
    pipeline = transformers.pipeline("zero-shot-classification", model=str(folder), device="cpu")
    names = list(task.label_names)
    right = [
        pipeline(text, names, hypothesis_template=task.hypothesis)["labels"][0] == names[label]
        for text, label in rows
    ]
    arguments = ["--model", str(folder), "--data", str(tmp_path), "train.device=cpu"]
    assert main(["evaluate", "task", "sst2_zero_shot", *arguments]) == 0
    assert f"accuracy             {sum(right) / 4:.4f}" in capfd.readouterr().out

    other = exported(tmp_path / "other", "classification", ("no", "yes"))
    assert main(["evaluate", "task", "sst2_zero_shot", "--model", str(other), *arguments[2:]]) == 2
    assert "labels are chosen by a model with a class named entailment" in capfd.readouterr().err


@pytest.mark.nightly  # tests/oldest_transformers.sh runs it in continuous integration.
def test_sentence_transformers_opens_our_own_architecture(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    config = replace(V2, p2c_index="paper")
    folder = tmp_path / "own"
    weights = random_weights(config)
    export_model(config, reader(weights), tiny_tokenizer(), folder)
    # After it has run a model's own code, transformers cannot do so in the same process.
    command = [sys.executable, "-c", ENCODE, str(folder), TEXT[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))

    row = transformers.AutoTokenizer.from_pretrained(folder)(TEXT[0], return_tensors="pt")
    with torch.no_grad():
        states = build_model(config, reader(weights)).encode(ModelInputs(row["input_ids"]))
    torch.testing.assert_close(found, states.mean(1), rtol=1e-5, atol=1e-5)
    assert ", trust_remote_code=True)" in (folder / "README.md").read_text()


def test_the_card_is_one_of_the_hub(encoder: Path) -> None:
    card = ModelCard.load(encoder / "README.md")
    assert card.data.library_name == "transformers"
    assert card.text.lstrip().startswith("# ")


def test_export_has_what_text_embeddings_inference_reads(encoder: Path, classifier: Path) -> None:
    """Fields without a default in its DebertaV2Config, and the tensors of its classifier."""
    for folder in (encoder, classifier):
        fields = json.loads((folder / "config.json").read_text())
        for key in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "intermediate_size", "hidden_act", "max_position_embeddings", "type_vocab_size",
            "initializer_range", "layer_norm_eps", "relative_attention", "max_relative_positions",
            "position_biased_input", "pos_att_type", "pooler_hidden_act",
            # Optional there; another architecture is assumed without them.
            "position_buckets", "share_att_key", "norm_rel_ebd", "conv_kernel_size", "conv_act",
        ):  # fmt: skip
            assert key in fields, key
        assert {fields["hidden_act"], fields["pooler_hidden_act"]} <= {"gelu", "relu"}
        assert fields["model_type"] == "deberta-v2"
    assert fields["architectures"] == ["DebertaV2ForSequenceClassification"]
    assert fields["id2label"] == {"0": "no", "1": "yes"}
    width = fields["pooler_hidden_size"]
    shapes = {
        name: tuple(x.shape) for name, x in load_file(classifier / "model.safetensors").items()
    }
    assert shapes["pooler.dense.weight"] == (width, width)
    assert shapes["classifier.weight"] == (2, width)
    assert {"pooler.dense.bias", "classifier.bias"} <= shapes.keys()
    pooling = json.loads((encoder / "1_Pooling" / "config.json").read_text())
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    assert not (classifier / "1_Pooling").exists()
