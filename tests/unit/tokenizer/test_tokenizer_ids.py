"""Training ids equal Hugging Face's for any text, and text never becomes a special token."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_deberta.errors import DataError
from megatron_deberta.tokenizer import load_tokenizer
from tests.support.machine_text import HOSTILE_PIECES, hostile_lines, real_lines

LINES = [*real_lines(5000), *hostile_lines(5000)]


@pytest.fixture(
    params=[
        "unigram_dir",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("bpe_dir", "gpt2_dir")),
    ]
)
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory as an exported model has it."""
    path = str(tmp_path / "model")
    load_tokenizer(request.getfixturevalue(request.param)).save(path)
    Path(path, "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    return path


@pytest.mark.slow
def test_corpus_ids_equal_hugging_face_on_ten_thousand_lines(exported: str) -> None:
    tokenizer = load_tokenizer(exported)
    ids, lengths = tokenizer.encode_texts(LINES)
    ours = [part.tolist() for part in np.split(ids, lengths.cumsum()[:-1])]
    assert [tokenizer.encode(line) for line in LINES[::10]] == ours[::10]
    auto = AutoTokenizer.from_pretrained(exported, split_special_tokens=True)
    assert auto(LINES, add_special_tokens=False)["input_ids"] == ours
    fast = PreTrainedTokenizerFast(
        tokenizer_file=f"{exported}/tokenizer.json", split_special_tokens=True
    )
    assert fast(LINES, add_special_tokens=False)["input_ids"] == ours
    backend = Backend.from_file(f"{exported}/tokenizer.json")
    backend.encode_special_tokens = True
    whole = backend.encode_batch_fast(LINES, add_special_tokens=False)
    assert [encoding.ids for encoding in whole] == ours
    reserved = set(tokenizer.special_ids) - {tokenizer.unk_id}
    assert not reserved & {token_id for ids in ours for token_id in ids}


def test_fill_mask_ids_equal_default_hugging_face(exported: str) -> None:
    tokenizer = load_tokenizer(exported)
    auto = AutoTokenizer.from_pretrained(exported)
    lines = LINES[::4]
    ours = [tokenizer.encode(line, parse_special=True) for line in lines]
    assert auto(lines, add_special_tokens=False)["input_ids"] == ours
    framed = auto("A text.")["input_ids"]
    assert framed == [tokenizer.cls_id, *tokenizer.encode("A text."), tokenizer.sep_id]
    assert tokenizer.encode("no special parsing is left on [MASK]") != tokenizer.encode(
        "no special parsing is left on [MASK]", parse_special=True
    )


def test_roles_and_sizes_agree_with_hugging_face(exported: str) -> None:
    tokenizer = load_tokenizer(exported)
    auto = AutoTokenizer.from_pretrained(exported)
    assert (auto.pad_token_id, auto.cls_token_id, auto.sep_token_id) == (
        tokenizer.pad_id,
        tokenizer.cls_id,
        tokenizer.sep_id,
    )
    assert (auto.unk_token_id, auto.mask_token_id) == (tokenizer.unk_id, tokenizer.mask_id)
    assert len(auto) == tokenizer.num_tokens <= tokenizer.vocab_size


def test_pieces_are_readable_text(exported: str) -> None:
    tokenizer = load_tokenizer(exported)
    text = "Return the value, or a default of the encoder."
    pieces = [tokenizer.piece_text(i) for i in tokenizer.encode(text)]
    assert "".join(pieces).strip() == text
    assert " the" in pieces
    assert tokenizer.piece_text(tokenizer.mask_id) == tokenizer.special.mask


def test_hugging_face_saving_it_again_changes_nothing(exported: str, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "again")
    first, again = load_tokenizer(exported), load_tokenizer(str(tmp_path / "again"))
    assert again.fingerprint == first.fingerprint
    assert again.vocab_size == first.vocab_size


@pytest.mark.parametrize("kind", ["unigram_dir", "bpe_dir"])
def test_sentencepiece_gives_the_same_ids(kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    tokenizer = load_tokenizer(path)
    reference = sentencepiece.SentencePieceProcessor(model_file=f"{path}/spm.model")
    rulers_left_out = 4
    lines = [line for line in real_lines(3000) if len(set(line)) >= rulers_left_out]
    ids, lengths = tokenizer.encode_texts(lines)
    ours = [part.tolist() for part in np.split(ids, lengths.cumsum()[:-1])]
    differ = [
        line
        for line, expected, found in zip(lines, reference.encode(lines), ours, strict=True)
        if expected != found
    ]
    # SentencePiece adds scores in float32 over the whole line, so ties may fall the other way.
    assert len(differ) <= len(lines) // 1000, differ[:3]


def test_masked_word_is_followed_by_the_piece_that_training_saw(unigram_dir: str) -> None:
    tokenizer = load_tokenizer(unigram_dir)
    whole = [tokenizer.piece(i) for i in tokenizer.encode("Return the value.")]
    masked = [
        tokenizer.piece(i) for i in tokenizer.encode("Return the [MASK].", parse_special=True)
    ]
    assert masked[-2:] == ["[MASK]", whole[-1]] == ["[MASK]", "."]
    between = tokenizer.encode("the [MASK] of", parse_special=True)
    assert between[1:] == [tokenizer.mask_id, *tokenizer.encode("of")]


def test_release_ids(unigram_dir: str) -> None:
    tokenizer = load_tokenizer(unigram_dir)
    ids = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.unk_id)
    assert ids == (0, 1, 2, 3)
    assert tokenizer.mask_id == 2000
    assert tokenizer.special_ids == (0, 1, 2, 3, 2000)
    assert (tokenizer.num_tokens, tokenizer.vocab_size) == (2001, 2100)
    assert tokenizer.piece(2050) == "<unused>"
    with pytest.raises(DataError, match="2100"):
        tokenizer.piece(2100)


def test_word_starts(unigram_dir: str, gpt2_dir: str) -> None:
    for path, text in (
        (unigram_dir, "unexpectedly reconfigured words"),
        (gpt2_dir, " unexpectedly reconfigured words"),
    ):
        tokenizer = load_tokenizer(path)
        starts = tokenizer.word_starts()
        assert starts.shape == (tokenizer.vocab_size,)
        assert starts.dtype == np.bool_
        ids = tokenizer.encode(text)
        assert len(ids) > 3
        assert starts[ids].sum() == 3
        assert starts[list(tokenizer.special_ids)].all()


def test_single_marks(unigram_dir: str, gpt2_dir: str) -> None:
    """Marks without a space before them; a longer piece of marks is no single one."""
    for path in (unigram_dir, gpt2_dir):
        tokenizer = load_tokenizer(path)
        marks = tokenizer.single_marks()
        assert marks.shape == (tokenizer.vocab_size,)
        assert {tokenizer.piece_text(int(i)) for i in np.flatnonzero(marks)} >= set(".,()_'")
        named = {tokenizer.piece(int(token_id)) for token_id in np.flatnonzero(marks)}
        assert not named & {"▁.", "Ġ.", "..", "a", "1", "▁"}
        starts = tokenizer.word_starts()
        assert (marks & ~starts).sum() > 5


def test_bpe_spells_unknown_characters_in_bytes(bpe_dir: str) -> None:
    tokenizer = load_tokenizer(bpe_dir)
    for piece in HOSTILE_PIECES:
        assert tokenizer.unk_id not in tokenizer.encode(piece), piece
    assert tokenizer.decode(tokenizer.encode("価 is a price")) == "価 is a price"


def test_decode_returns_plain_text(unigram_dir: str) -> None:
    tokenizer = load_tokenizer(unigram_dir)
    text = "The value of the expression is returned."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogate_is_refused(unigram_dir: str) -> None:
    with pytest.raises(DataError, match="not valid Unicode"):
        load_tokenizer(unigram_dir).encode("a\ud800b")


def test_fingerprint_follows_ids_only(unigram_dir: str, tmp_path: Path) -> None:
    original = load_tokenizer(unigram_dir).fingerprint
    assert load_tokenizer(f"{unigram_dir}/spm.model").fingerprint == original
    copy = tmp_path / "copy"
    shutil.copytree(unigram_dir, copy)
    assert load_tokenizer(str(copy)).fingerprint == original
    spec = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary[100], vocabulary[101] = vocabulary[101], vocabulary[100]
    (copy / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(str(copy)).fingerprint != original


def test_special_tokens_are_parsed_for_the_own_call_only(exported: str) -> None:
    """Threads of one tokenizer: a corpus never has special tokens that another call parses."""
    tokenizer = load_tokenizer(exported)
    text = "Return the [MASK] of " * 20
    expected = [tokenizer.encode(text, parse_special=parses) for parses in (False, True)]
    assert [ids.count(tokenizer.mask_id) for ids in expected] == [0, 20]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(tokenizer.encode, text, parse_special=bool(n % 2)) for n in range(400)]
        assert all(call.result() == expected[n % 2] for n, call in enumerate(calls))
