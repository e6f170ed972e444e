"""RetroMAE between masked language modelling and the fine-tuning of embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.store import find_newest
from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE
from megatron_deberta.hf import MegatronDebertaForMaskedLM
from megatron_deberta.hf.loading import load_pretrained
from tests.integration.test_documented_commands import write_scored
from tests.support.jobs import Run, assert_same_checkpoints, records
from tests.support.tiny_runs import export_run

RETROMAE = (
    "objective.name=retromae", "objective.mask_probability=0.3", "data.packing=doc_sentences",
    "train.eval_every=2", "log.every=1",
)  # fmt: skip


def newest(run_dir: Path) -> CheckpointReader:
    path = find_newest(run_dir)
    assert path is not None
    return CheckpointReader(path)


@pytest.mark.slow
def test_from_a_masked_run_to_embeddings(pretrain: Run, tmp_path: Path) -> None:
    assert pretrain("train.exit_step=1", run_dir="mlm")[0] == EXIT_DONE
    start = (*RETROMAE, f"checkpoint.load_from={tmp_path / 'mlm'}")
    assert pretrain(*start, "train.exit_step=4", run_dir="whole")[0] == EXIT_DONE
    for step in (2, 4):
        assert pretrain(*start, f"train.exit_step={step}")[0] == EXIT_DONE
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert_same_checkpoints(run, whole, 4)
    for step, values in records(whole, "train").items():
        assert records(run, "train")[step]["reconstruction_loss"] == values["reconstruction_loss"]
    measured = records(run, "validation")[4]
    assert measured.keys() >= {"loss", "masked_accuracy", "reconstruction_accuracy"}
    before, after = newest(tmp_path / "mlm").shapes, newest(run).shapes
    assert {*after} - {*before} == {name for name in after if name.startswith("row_decoder.")}

    # A masked run starts from it without the decoder; a resumed run is not another objective.
    back = f"checkpoint.load_from={run}"
    assert pretrain(back, "train.exit_step=1", run_dir="back")[0] == EXIT_DONE
    assert newest(tmp_path / "back").shapes == before
    code, error = pretrain(*RETROMAE, "objective.name=mlm", "train.exit_step=5")
    assert code == EXIT_USAGE
    assert "objective.name='mlm' but the checkpoint of step 4 was trained with 'retromae'" in error

    assert main(["report", str(run), "--output", str(tmp_path / "report.html")]) == EXIT_DONE
    text = (tmp_path / "report.html").read_text()
    assert "Of RetroMAE: the loss of the encoder" in text
    assert "reconstruction loss" in text

    exported = export_run(run, tmp_path / "exported")
    card = (exported / "README.md").read_text()
    assert "a decoder of one layer, which is left out here" in card
    assert f"{measured['loss']:.4f}" in card
    model = load_pretrained(MegatronDebertaForMaskedLM, exported)
    assert not [name for name, _ in model.named_parameters() if "row_decoder" in name]
    assert main(["fill-mask", str(run), "The [MASK] man"]) == EXIT_DONE
    (tmp_path / "text.txt").write_text("The old man walked to the river .\n")
    words = ["evaluate", "perplexity", "--model", str(run), "--data", str(tmp_path / "text.txt")]
    assert main([*words, "--stride", "8", "data.sequence_length=32"]) == EXIT_DONE

    write_scored(tmp_path / "pairs")
    folder = f"train.run_dir={tmp_path / 'embeddings'}"
    settings = (
        "--settings", "positives", "train.steps=1", "train.global_batch_size=4",
        "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-9", "train.device=cpu",
    )  # fmt: skip
    words = ["finetune", "stsb_embed", "--model", str(run), "--data", str(tmp_path / "pairs")]
    assert main([*words, folder, *settings]) == EXIT_DONE
    name = "encoder.layers.0.ffn.up.weight"
    tuned = newest(tmp_path / "embeddings")
    assert not [name for name in tuned.shapes if name.startswith("row_decoder.")]
    torch.testing.assert_close(tuned.tensor(name), newest(run).tensor(name), rtol=0, atol=1e-6)
    assert not torch.equal(newest(run).tensor(name), newest(tmp_path / "mlm").tensor(name))
