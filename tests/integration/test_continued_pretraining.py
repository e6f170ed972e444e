"""The commands of docs/continued-pretraining.md, on tiny models in the released files' format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cli.main import main
from megatron_deberta.config import load_config
from megatron_deberta.files import sha256_file
from megatron_deberta.hf.config import from_hf_config
from megatron_deberta.hf.import_model import OBJECTIVE
from megatron_deberta.hf.loading import load_pretrained
from tests.integration.test_documented_commands import commands, write_corpus
from tests.support.jobs import ROOT, records
from tests.support.releases import SIZES, read_pickles_here, write_release

pytestmark = pytest.mark.slow
PAGE = "docs/continued-pretraining.md"
STEPS = (
    *("train.steps=3", "train.global_batch_size=4", "train.micro_batch_size=2"),
    *("data.sequence_length=32", "data.num_workers=0", "train.eval_every=null", "train.device=cpu"),
    *("optimizer.warmup_fraction=null", "optimizer.warmup_steps=1"),
    *("parallel.engine=plain", "log.level=warning", "log.every=1"),
)
TINY = tuple(f"model.{key}={value}" for key, value in SIZES.items())
RELEASES = {
    "deberta-v3-base": ("v3", False),
    "deberta-v3-xsmall": ("v3", True),
    "deberta-v2-xlarge": ("v2", False),
    "deberta-base": ("v1", False),
}
EXPORTS = {
    "domain": "deberta-v3-base",
    "xsmall": "deberta-v3-xsmall",
    "v2": "deberta-v2-xlarge",
    "v1": "deberta-base",
}


@pytest.fixture(scope="module")
def folder(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the page's commands, with an interruption; return their working directory."""
    folder = tmp_path_factory.mktemp("continued")
    (folder / "configs").symlink_to(ROOT / "configs")
    write_corpus(folder / "corpus", run_yaml.parent / "docs.jsonl")
    for name, (version, generator) in RELEASES.items():
        write_release(folder / "downloads" / name, version, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        read_pickles_here(patch)
        for program, *arguments in commands(PAGE):
            assert program == "megatron-deberta"
            run(arguments)
    return folder


def run(arguments: list[str]) -> None:
    """Run a command of the page with digests of the files, or for a few steps."""
    files = {"--sha256": "pytorch_model.bin", "--generator-sha256": "pytorch_model.generator.bin"}
    for option in files.keys() & set(arguments):
        release = Path(arguments[arguments.index("hf") + 1])
        arguments[arguments.index(option) + 1] = sha256_file(release / files[option])
    if arguments[0] == "pretrain" and "continue_v3_base" in arguments[1]:
        arguments += [*STEPS, *TINY]
        if not any("run_dir" in argument for argument in arguments):
            assert main([*arguments, "train.exit_step=2"]) == 0
    elif arguments[0] == "pretrain":
        arguments += STEPS
    assert main(arguments) == 0, arguments


@pytest.mark.parametrize(("export", "release"), EXPORTS.items())
def test_an_export_opens_in_transformers_with_changed_weights(
    folder: Path, export: str, release: str
) -> None:
    """Layer norms' weights, which bf16 rounds to the same values, may be unchanged."""
    trained = load_pretrained(AutoModel, folder / "exports" / export)
    published = AutoModel.from_pretrained(
        folder / "downloads" / release, dtype=torch.float32, local_files_only=True
    )
    assert type(trained) is type(published)
    before = dict(published.named_parameters())
    for name, parameter in trained.named_parameters():
        assert parameter.isfinite().all()
        assert (parameter - before[name]).abs().max() < 1e-2, name
        if name.endswith("dense.weight"):
            assert not parameter.equal(before[name]), name


def test_the_interrupted_run_ends_like_the_others(folder: Path) -> None:
    names = ("continue_v3_base", "generator", "both", "xsmall", "v2", "v1")
    for name in names:
        assert list(records(folder / "runs" / name)) == [1, 2, 3]


def test_the_generator_is_trained_alone_where_the_rest_is_frozen(folder: Path) -> None:
    imported, trained = (
        CheckpointReader(step_dir(folder / name, step))
        for name, step in (("imported/deberta-v3-base", 0), ("runs/generator", 3))
    )
    for name in imported.shapes:
        is_frozen = name.startswith(("discriminator.", "generator.embeddings."))
        if is_frozen or name.endswith("dense.weight"):
            assert trained.tensor(name).equal(imported.tensor(name)) == is_frozen, name


def test_a_new_generator_has_every_second_layer(folder: Path) -> None:
    reader = CheckpointReader(step_dir(folder / "imported" / "deberta-v3-base", 0))
    assert not reader.tensor("discriminator.embeddings.token.delta.weight").any()
    for name in ("attention.query.weight", "ffn.up.bias"):
        for layer in range(2):
            own = reader.tensor(f"generator.encoder.layers.{layer}.{name}")
            assert own.equal(reader.tensor(f"discriminator.encoder.layers.{2 * layer}.{name}"))


def test_the_run_file_has_the_architecture_of_the_release() -> None:
    """As in the published ``config.json``, and with its objective."""
    published = {
        "model_type": "deberta-v2",
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "layer_norm_eps": 1e-7,
        "max_relative_positions": -1,
        "position_biased_input": False,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "type_vocab_size": 0,
        "vocab_size": 128100,
    }
    config = load_config(ROOT / "configs/runs/continue_v3_base.yaml")
    encoder = from_hf_config(published, "deberta-v2")
    assert config.model == replace(encoder, head="rtd")
    assert config.objective == OBJECTIVE
