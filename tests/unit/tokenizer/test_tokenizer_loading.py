"""Layouts that ``load_tokenizer`` accepts, and errors for the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from megatron_deberta.errors import DataError
from megatron_deberta.tokenizer import load_tokenizer

ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def word_level(words: list[str], pre_tokenizer: Any) -> dict[str, Any]:
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[3])
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer
    spec: dict[str, Any] = json.loads(backend.to_str())
    return spec


def write(folder: Path, spec: dict[str, Any]) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return str(folder)


def test_any_tokenizer_json(tmp_path: Path) -> None:
    spec = word_level([*ROBERTA, "hello", "world"], pre_tokenizers.BertPreTokenizer())
    tokenizer = load_tokenizer(write(tmp_path, spec))
    assert (tokenizer.cls_id, tokenizer.pad_id, tokenizer.mask_id) == (0, 1, 4)
    assert tokenizer.vocab_size == tokenizer.num_tokens == 7
    assert tokenizer.encode("hello <mask> world", parse_special=True) == [5, 4, 6]
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint == tokenizer.fingerprint


def test_special_tokens_reachable_from_text_are_refused(tmp_path: Path) -> None:
    spec = word_level([*ROBERTA, "hello"], pre_tokenizers.WhitespaceSplit())
    with pytest.raises(DataError, match="becomes the special token"):
        load_tokenizer(write(tmp_path, spec))


def test_foreign_unigram_json_is_guarded(unigram_dir: str, tmp_path: Path) -> None:
    spec = json.loads(Path(unigram_dir, "tokenizer.json").read_text())
    spec["pre_tokenizer"] = spec["pre_tokenizer"]["pretokenizers"][0]
    unguarded = Backend.from_str(json.dumps(spec))
    unguarded.encode_special_tokens = True
    assert 1 in unguarded.encode("a [CLS] b").ids  # the trap
    tokenizer = load_tokenizer(write(tmp_path, spec))
    assert 1 not in tokenizer.encode("a [CLS] b")


def test_gpt2_files_get_the_missing_roles(gpt2_dir: str) -> None:
    tokenizer = load_tokenizer(gpt2_dir)
    pieces = len(json.loads(Path(gpt2_dir, "vocab.json").read_text()))
    assert tokenizer.num_tokens == pieces + 5
    assert tokenizer.mask_id == pieces + 4
    assert tokenizer.decode(tokenizer.encode(" any bytes\u00e9\x00 ")) == " any bytes\u00e9\x00 "


def test_roberta_files_keep_their_ids(gpt2_dir: str, tmp_path: Path) -> None:
    shutil.copy(f"{gpt2_dir}/merges.txt", tmp_path)
    vocabulary = json.loads(Path(gpt2_dir, "vocab.json").read_text())
    del vocabulary["<|endoftext|>"]
    shifted = {name: i for i, name in enumerate(ROBERTA[:4])}
    shifted |= {piece: token_id + 4 for piece, token_id in vocabulary.items()}
    shifted["<mask>"] = len(shifted)
    (tmp_path / "vocab.json").write_text(json.dumps(shifted))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.cls_id, tokenizer.pad_id, tokenizer.sep_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert tokenizer.num_tokens == len(shifted)
    assert tokenizer.encode("a <mask> b", parse_special=True).count(tokenizer.mask_id) == 1


def test_missing_roles_are_listed(tmp_path: Path) -> None:
    spec = word_level(["<s>", "x", "</s>", "<unk>"], pre_tokenizers.BertPreTokenizer())
    with pytest.raises(DataError, match=r"no token for pad .*, mask \(\[MASK\] or <mask>\)"):
        load_tokenizer(write(tmp_path, spec))


def test_ambiguous_role_is_refused_until_declared(tmp_path: Path) -> None:
    spec = word_level([*ROBERTA, "[CLS]"], pre_tokenizers.BertPreTokenizer())
    path = write(tmp_path, spec)
    with pytest.raises(DataError, match="could both be the cls token"):
        load_tokenizer(path)
    (tmp_path / "tokenizer_config.json").write_text('{"cls_token": {"content": "[CLS]"}}')
    assert load_tokenizer(path).cls_id == 5


def test_roles_sharing_a_token_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, word_level([*ROBERTA], pre_tokenizers.BertPreTokenizer()))
    (tmp_path / "tokenizer_config.json").write_text('{"sep_token": "<s>"}')
    with pytest.raises(DataError, match="cls and sep share token <s>"):
        load_tokenizer(path)


def _twice(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"][50] = spec["model"]["vocab"][51]


def _same_id(spec: dict[str, Any]) -> None:
    spec["added_tokens"][1]["id"] = 2


def _no_model(spec: dict[str, Any]) -> None:
    del spec["model"]


@pytest.mark.parametrize("damage", [_twice, _same_id, _no_model])
def test_damaged_json_is_refused(damage: Any, unigram_dir: str, tmp_path: Path) -> None:
    spec = json.loads(Path(unigram_dir, "tokenizer.json").read_text())
    damage(spec)
    with pytest.raises(DataError, match="tokenizer"):
        load_tokenizer(write(tmp_path, spec))


def test_rows_below_ids_are_refused(unigram_dir: str, tmp_path: Path) -> None:
    shutil.copytree(unigram_dir, tmp_path / "copy")
    config = tmp_path / "copy" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_vocab_size": 2000}))
    with pytest.raises(DataError, match="below the 2001 ids"):
        load_tokenizer(str(tmp_path / "copy"))


def test_useless_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"expected tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    for content in (b"no protobuf at all", b""):
        (tmp_path / "spm.model").write_bytes(content)
        with pytest.raises(DataError, match="not a SentencePiece model"):
            load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_lower_casing_beside_a_sentencepiece_model_is_not_ignored(
    unigram_dir: str, tmp_path: Path
) -> None:
    shutil.copy(f"{unigram_dir}/spm.model", tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"do_lower_case": false, "vocab_type": "spm"}')
    assert load_tokenizer(str(tmp_path)).vocab_size == 2100
    config.write_text('{"do_lower_case": true}')
    with pytest.raises(DataError, match="do_lower_case=true"):
        load_tokenizer(str(tmp_path))


def test_byte_level_files_may_have_a_prefix(gpt2_dir: str, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(Path(gpt2_dir, name), tmp_path / f"gpt2-{name}")
    assert load_tokenizer(str(tmp_path)).fingerprint == load_tokenizer(gpt2_dir).fingerprint
    shutil.copy(tmp_path / "gpt2-vocab.json", tmp_path / "other-vocab.json")
    with pytest.raises(DataError, match="2 \\*vocab.json files; rename one vocab.json"):
        load_tokenizer(str(tmp_path))
