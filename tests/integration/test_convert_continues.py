"""``pretrain`` starts from a run file and weights written by ``convert --from``."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cli.main import main
from tests.support.jobs import records, run_to_end
from tests.support.stock_weights import randomize


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with transformers, without a tokenizer."""
    folder = tmp_path_factory.mktemp("release")
    config = DebertaV2Config(
        vocab_size=600,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=48,
        relative_attention=True,
        max_relative_positions=32,
        position_buckets=8,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
    )
    model = DebertaV2ForMaskedLM(config)
    randomize(model)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_two_steps_from_a_release(
    run_yaml: Path, release: Path, tmp_path: Path, engine: str
) -> None:
    new, run_dir = tmp_path / "new", tmp_path / "run"
    tokenizer = ["--tokenizer", str(run_yaml.parent / "tokenizer")]
    assert main(["convert", "--from", "hf", str(release), "--output", str(new), *tokenizer]) == 0
    overrides = [
        f"data.train=[{run_yaml.parent}/docs_text_document]",
        f"precision.engine={engine}",
        *("data.num_workers=0", "log.every=1", "log.tensorboard=false", "train.device=cpu"),
        *("train.steps=2", "train.global_batch_size=4", "train.micro_batch_size=2"),
        *("optimizer.warmup_steps=1", "optimizer.learning_rate=1.0e-4", "train.eval_every=null"),
    ]
    run_to_end(new / "run.yaml", run_dir, 1, *overrides)
    assert list(records(run_dir)) == [1, 2]
    imported, trained = (CheckpointReader(step_dir(*at)) for at in ((new, 0), (run_dir, 2)))
    assert trained.shapes == imported.shapes
    for name in imported.shapes:
        before, after = imported.tensor(name), trained.tensor(name)
        # Adam changes a weight by about the learning rate per step.
        assert (after - before).abs().max() < 1e-3, name
    name = "encoder.layers.0.ffn.up.weight"
    assert not trained.tensor(name).equal(imported.tensor(name))
