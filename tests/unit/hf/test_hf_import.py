from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import sha256_file
from megatron_deberta.hf.config import SpecialIds
from megatron_deberta.hf.export_model import write_hf_model
from megatron_deberta.hf.legacy_bin import convert_bin
from megatron_deberta.hf.published import Release, open_release
from tests.support.releases import edited_tensors, read_pickles_here
from tests.support.tiny_models import V2, random_weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model of type deberta-v2."""
    directory = tmp_path / "in"
    directory.mkdir()
    weights = random_weights(V2)
    write_hf_model(directory, V2, "deberta-v2", lambda name: weights[name], SpecialIds())
    return directory


def read(directory: Path, **options: Any) -> Release:
    return open_release(directory, "hf", directory.parent, **options)


def test_next_sentence_labels_are_plain_and_old_exports_still_load(tmp_path: Path) -> None:
    """Exports of earlier versions label the classes "goes on" and "does not"."""
    config = replace(V2, type_vocab_size=2, next_sentence_head=True)
    weights = random_weights(config)
    write_hf_model(tmp_path, config, "deberta-v2", lambda name: weights[name], SpecialIds())
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["id2label"] == {"0": "IsNext", "1": "NotNext"}
    assert fields["label2id"] == {"IsNext": 0, "NotNext": 1}
    del fields["label2id"]
    fields["id2label"] = {"0": "goes on", "1": "does not"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    release = read(tmp_path)
    assert release.config == config
    assert release.notes == ()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in release.tensors())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("", "module."),
        ("", "_orig_mod."),
        ("", "module._orig_mod."),
        ("", "model."),
        ("deberta.", "deberta._orig_mod."),
    ],
)
def test_names_of_wrapped_models_are_read(model: Path, old: str, new: str) -> None:
    """Of DistributedDataParallel, torch.compile of the whole or a part, and Lightning."""
    with edited_tensors(model) as tensors:
        for name in sorted(tensors):
            if name.startswith(old):
                tensors[new + name.removeprefix(old)] = tensors.pop(name)
    weights = random_weights(V2)
    release = read(model)
    assert release.config == V2
    assert release.notes == ()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in release.tensors())


def test_a_tensor_in_two_files_is_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "model.fp16.safetensors")
    save_file(tensors, model / "old.safetensors")
    with pytest.raises(
        CheckpointError, match=r"fp16\.safetensors and .*old\.safetensors both hold"
    ):
        read(model)


BIAS = "deberta.encoder.layer.1.output.dense.bias"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors | {f"teacher.{n}": t.clone() for n, t in tensors.items()},
            r"several models, with the prefixes '', 'teacher\.'",
        ),
        (
            lambda tensors: {f"{name}.lora": tensor for name, tensor in tensors.items()},
            r"word_embeddings\.weight \(the first tensor is .*lora",
        ),
        (
            lambda tensors: {name: tensor for name, tensor in tensors.items() if name != BIAS},
            f"lack {BIAS}",
        ),
        (lambda tensors: tensors | {"deberta.encoder.layer.9.x": torch.ones(1)}, r"layer\.9\.x"),
    ],
)
def test_tensors_of_other_models_are_refused(
    model: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    save_file(edit(load_file(model / "model.safetensors")), model / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read(model)


def test_untied_embeddings_are_refused(model: Path) -> None:
    name = "cls.predictions.decoder.weight"
    table = "deberta.embeddings.word_embeddings.weight"
    with edited_tensors(model) as tensors:
        tensors[name] = tensors[table].clone()
    assert read(model).notes == (f"ignored, not part of the model: {name}",)
    with edited_tensors(model) as tensors:
        tensors[name] += 1
    with pytest.raises(CheckpointError, match="tied"):
        read(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 64}, r"intermediate\.dense\.weight: shape \(48, 32\)"),
        ({"model_type": "bert"}, "'bert'"),
    ],
)
def test_config_of_another_model_is_refused(
    model: Path, change: dict[str, object], message: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        read(model)


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_damaged_config_is_refused(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json.*download it again"):
        read(model)


def test_damaged_weights_are_refused(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        read(model)


def test_missing_parts_are_named(model: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read(model / "nothing")
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="found none"):
        read(model)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="00001-of-00002.safetensors is missing"):
        read(model)
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json or model_config.json"):
        read(model)


@pytest.mark.parametrize("weight_map", [[], None, {}, "x", {"a": 1}, {"a": "../model.safetensors"}])
def test_damaged_index_is_refused(model: Path, weight_map: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map=.* download it again"):
        read(model)


def test_digest(model: Path) -> None:
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    read(model, sha256=digest.upper())
    with pytest.raises(CheckpointError, match="SHA-256"):
        read(model, sha256="0" * 64)


def test_pickle_only_by_flag_and_only_one(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="--allow-pickle-weights-only"):
        read(model)
    with pytest.raises(CheckpointError, match="--sha256"):
        read(model, allow_pickle=True)
    digest = sha256_file(model / "pytorch_model.bin")
    back = dict(read(model, allow_pickle=True, sha256=digest).tensors())
    weights = random_weights(V2)
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    (model / "pytorch_model.bin").rename(model / "first.bin")
    torch.save(tensors, model / "second.bin")
    with pytest.raises(CheckpointError, match="exactly one"):
        read(model, allow_pickle=True)


def test_a_folder_of_graphs_without_weights_says_so(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").touch()
    with pytest.raises(CheckpointError, match="ONNX graphs but no weights; run the graph in onnx/"):
        read(model)


def test_generator_beside_its_discriminator(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a DeBERTaV3 release."""
    read_pickles_here(monkeypatch)
    whole = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    detecting = whole | {"mask_predictions.classifier.weight": torch.ones(1, 32)}
    torch.save(detecting, model / "pytorch_model.bin")
    last = f".layer.{V2.num_layers - 1}."
    generating = {name: value for name, value in whole.items() if last not in name}
    torch.save(generating, model / "pytorch_model.generator.bin")
    (model / "bpe_encoder.bin").write_bytes(b"no weights")
    config = json.loads((model / "config.json").read_text())
    shorter = json.dumps(config | {"num_hidden_layers": V2.num_layers - 1})
    (model / "generator_config.json").write_text(shorter)
    digest = sha256_file(model / "pytorch_model.bin")
    discriminator = read(model, allow_pickle=True, sha256=digest)
    assert discriminator.config == V2
    assert "discriminator" in discriminator.why_no_masks
    digest = sha256_file(model / "pytorch_model.generator.bin")
    generator = read(model, allow_pickle=True, sha256=digest, generator=True)
    assert generator.config == replace(V2, num_layers=V2.num_layers - 1)
    assert generator.why_no_masks == ""
    weights = random_weights(V2)
    assert all(torch.equal(value, weights[name]) for name, value in generator.tensors())


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_code_in_a_pickle_does_not_run(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"x": Evil(tmp_path / "ran")}, model / "pytorch_model.bin")
    digest = sha256_file(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as plain weights"):
        read(model, allow_pickle=True, sha256=digest)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "weights.safetensors").exists()


def test_reading_process_has_no_network(tmp_path: Path) -> None:
    """The child's audit hook blocks sockets and subprocesses."""
    from megatron_deberta.hf import legacy_bin

    with pytest.raises(PermissionError, match="socket"):
        legacy_bin._block_side_effects("socket.connect", (socket, ("127.0.0.1", 80)))
    with pytest.raises(PermissionError, match="Popen"):
        legacy_bin._block_side_effects("subprocess.Popen", ())
    legacy_bin._block_side_effects("open", ("file", "r", 0))


@pytest.mark.slow
def test_tied_tensors_and_wrapped_states_in_a_pickle(tmp_path: Path) -> None:
    tied = torch.ones(3, 2)
    torch.save({"model": {"a": tied, "b": tied, "step": 7}}, tmp_path / "old.bin")
    convert_bin(tmp_path / "old.bin", tmp_path / "new.safetensors")
    back = load_file(tmp_path / "new.safetensors")
    assert back.keys() == {"a", "b"}
    torch.save({"step": 7}, tmp_path / "old.bin")
    with pytest.raises(ValueError, match="no tensors"):
        convert_bin(tmp_path / "old.bin", tmp_path / "new.safetensors")
