"""Ids of text in any Unicode form: equal on all ways, and those of SentencePiece.

Tokenizers of our own training compose text; published ones do what SentencePiece does.
"""

from __future__ import annotations

import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.text.preprocess.encoding import fast_bpe_encoder, sentencepiece_encoder
from megatron_deberta.text.preprocess.pipeline import preprocess
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer, loading
from megatron_deberta.tokenizer.loading import sentencepiece_tokenizer
from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.tiny_models import sentencepiece_model

FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")
SENTENCES = (
    "Tiếng Việt là ngôn ngữ chính thức tại Việt Nam.",
    "한국어는 대한민국의 공용어이다. 세종대왕이 훈민정음을 창제하였다.",
    "हिन्दी विश्व की एक प्रमुख भाषा है ज़्यादा क़लम ड़ ढ़",
    "العَرَبِيَّة هي أكثر اللغات تحدثاً آ ؤ ئ ﻻ ﷺ",
    "שָׁלוֹם עֲלֵיכֶם הָעִבְרִית שׁ שׂ",
    "Ἐν ἀρχῇ ἦν ὁ λόγος, καὶ ὁ λόγος ἦν πρὸς τὸν θεόν ᾧ ᾂ",
    "👩‍👩‍👧‍👦 👍🏽 ❤️ 🇩🇪 ™️ ℹ️ ©️",
    "ภาษาไทยเป็นภาษา น้ำ กำ ທຳ",
    "བོད་སྐད་ཡིག་ རྫོགས་པ་ཆེན་པོ གྷ ཌྷ",
    "Ça coûte ñ Å ① ª º ﬁ ½ ² ㎏ ｶﾞ ﾊﾟ パ が Ǻ ẛ̣ ≠ ≮ ŉ",
    "Русский язык ё й Ё Ї Ӂ",
)
WORDS = [word for sentence in SENTENCES for word in sentence.split()]
MARKS = (
    "\u0300\u0301\u0302\u0303\u0308\u030a\u0323\u0327\u0328\u0338\u0342\u0345\u0344\u0340\u093c"
    "\u0f71\u0f72\u0f74\u05c1\u05b8\u064e\u0651\u0653\u3099\u309a\uff9e\u200d\u200c\ufe0f\u200b"
    "\u00ad\u0e33\u1161\u11a8"
)
ODD = (
    "①ªº²½㎏ﬁﬃﷺ™ℹ\u0344\u212b\u2126\u1fef\u0958\ufb2a\ufb1d\uf900\u2adc가각\u1100\u1161\u3131\uffa1"
    "\uffc2\x01\x7f\u2581\u2585\ufdd0\U0010ffff～\u3000\u00a0\t\r\n\u2028\ufeff\U0001d15e"
)


def random_strings(count: int, seed: int) -> list[str]:
    """Return strings of words, letters with wrong marks and odd characters, in mixed forms."""
    draw = random.Random(seed)

    def part() -> str:
        kind = draw.random()
        if kind < 0.5:
            content = draw.choice(WORDS)
        elif kind < 0.7:
            content = draw.choice("".join(WORDS) + "aeiou")
            content += "".join(draw.choices(MARKS, k=draw.randint(1, 3)))
        elif kind < 0.85:
            content = draw.choice(ODD) + "".join(draw.choices(MARKS, k=draw.randint(0, 2)))
        else:
            content = "".join(draw.choice(draw.choice(WORDS)) for _ in range(draw.randint(1, 6)))
        form = draw.choice([*FORMS, None])
        return unicodedata.normalize(form, content) if form else content

    return [
        draw.choice([" ", "", " "]).join(part() for _ in range(draw.randint(1, 8)))
        for _ in range(count)
    ]


STRINGS = random_strings(300, 7)


@cache
def published_model(kind: str) -> bytes:
    """Return a model that SentencePiece trained, on text that is not composed by us."""
    lines = [unicodedata.normalize("NFC", text) for text in random_strings(1500, 1)]
    return sentencepiece_model(
        [line.replace("\u2585", "") for line in lines],
        model_type=kind,
        vocab_size=900,
        character_coverage=1.0,
        byte_fallback=kind == "bpe",
    )


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def own_dir(kind: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("own") / kind)
    texts = [unicodedata.normalize("NFD", text) for text in random_strings(1500, 1)]
    train_sentencepiece(texts, path, vocab_size=900, model_type=kind, character_coverage=1.0)
    return path


def split(found: tuple[Any, Any]) -> list[list[int]]:
    return [part.tolist() for part in np.split(found[0], np.cumsum(found[1])[:-1])]


def assert_same_on_all_ways(tokenizer: Tokenizer, folder: Path) -> list[list[int]]:
    """Compare training, offsets, the fast library, shards, the export and ``AutoTokenizer``."""
    ids = split(tokenizer.encode_texts(STRINGS))
    assert [tokenizer.encode(text) for text in STRINGS] == ids
    assert [found.tolist() for found, _ in tokenizer.encode_with_offsets(STRINGS)] == ids
    if (fast := fast_bpe_encoder(tokenizer)) is not None:
        assert split(fast(STRINGS)) == ids
    export = folder / "export"
    tokenizer.save(str(export))
    (export / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    auto = AutoTokenizer.from_pretrained(str(export), split_special_tokens=True)
    assert auto(STRINGS, add_special_tokens=False)["input_ids"] == ids
    again = load_tokenizer(str(export))
    assert (again.fingerprint, again.composes) == (tokenizer.fingerprint, tokenizer.composes)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in STRINGS))
    preprocess(find_sources([str(corpus)]), str(export), str(folder / "shard"))
    shard = np.fromfile(folder / "shard_text_document.bin", dtype_for_vocab(tokenizer.vocab_size))
    assert shard.tolist() == [token_id for text_ids in ids for token_id in text_ids]
    return ids


def test_forms_have_equal_ids_with_an_own_tokenizer(own_dir: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(own_dir)
    assert tokenizer.composes
    ids = assert_same_on_all_ways(tokenizer, tmp_path)
    by_form = {
        form: split(tokenizer.encode_texts([unicodedata.normalize(form, x) for x in STRINGS]))
        for form in FORMS
    }
    assert by_form["NFD"] == by_form["NFC"] == ids
    assert by_form["NFKD"] == by_form["NFKC"]
    # What SentencePiece gives for composed text.
    assert split(sentencepiece_encoder(tokenizer)(STRINGS)) == ids
    from_model = load_tokenizer(f"{own_dir}/spm.model")
    assert (from_model.composes, from_model.fingerprint) == (True, tokenizer.fingerprint)


def test_published_models_give_sentencepieces_ids(kind: str, tmp_path: Path) -> None:
    content = published_model(kind)
    tokenizer = sentencepiece_tokenizer(content, "published")
    assert not tokenizer.composes
    ids = assert_same_on_all_ways(tokenizer, tmp_path)
    assert ids == sentencepiece.SentencePieceProcessor(model_proto=content).encode(STRINGS)


def test_text_is_cut_between_words_only(own_dir: str) -> None:
    """Many texts at once, as in a shard, and all of them as one long document."""
    tokenizer = load_tokenizer(own_dir)
    document = " ".join(STRINGS)
    whole = tokenizer.encode(unicodedata.normalize("NFD", document))
    assert whole == tokenizer.encode(unicodedata.normalize("NFC", document))
    backend = Backend.from_file(f"{own_dir}/tokenizer.json")
    backend.encode_special_tokens = True
    assert backend.encode(document, add_special_tokens=False).ids == whole


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("①\u0301", "1\u0301"),
        ("ª\u0300", "à"),
        ("ﬁ\u0301", "fi\u0301"),
        ("ﾊﾟ", "パ"),
        ("e\u0302\u0323", "ê\u0323"),
        ("a\u0327\u0301", "a\u0327\u0301"),
        ("\u1112\u1161\u11ab", "한"),
        ("\u0344", "\u0308\u0301"),
        ("\u0301a", "\u0301a"),
        ("～", "～"),
    ],
)
def test_published_normalization_takes_the_longest_match(text: str, normalized: str) -> None:
    tokenizer = sentencepiece_tokenizer(published_model("unigram"), "published")
    assert tokenizer._backend.normalizer.normalize_str(f"x {text} x") == f"x {normalized} x"


def test_offsets_cover_whole_characters(own_dir: str) -> None:
    tokenizer = load_tokenizer(own_dir)
    for sentence in SENTENCES:
        # Its dot moves behind the dot below when it is decomposed.
        sentence = sentence.replace("ẛ̣", "")
        composed, decomposed = (unicodedata.normalize(form, sentence) for form in ("NFC", "NFD"))
        (_, spans), (_, longer) = tokenizer.encode_with_offsets([composed, decomposed])
        expected = [unicodedata.normalize("NFD", composed[a:b]) for a, b in spans.tolist()]
        assert [decomposed[a:b] for a, b in longer.tolist()] == expected


def test_offsets_of_removed_and_half_width_marks() -> None:
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4, "cafe": 5, "ガ": 6}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    spec = json.loads(backend.to_str())
    tokenizer = Tokenizer(spec, sentencepiece_tokenizer(published_model("bpe"), "x").special)
    ((ids, spans),) = tokenizer.encode_with_offsets(["le cafe\u0301 noir"])
    assert (ids.tolist()[1], spans.tolist()[1]) == (5, [3, 8])


def test_old_tokenizers_keep_their_ids_and_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shards and models made with them are still theirs."""
    new = sentencepiece_tokenizer(published_model("unigram"), "published")
    old = Tokenizer({**new.spec, "normalizer": new.plain_normalizer}, new.special)
    old.save(str(tmp_path))
    loading._warn_once.cache_clear()
    loaded = load_tokenizer(str(tmp_path))
    assert "--normalize nfc" in caplog.text
    assert loaded.spec["normalizer"] == new.plain_normalizer
    assert loaded.fingerprint == new.fingerprint
    assert loaded.encode(SENTENCES[0]) == new.encode(SENTENCES[0])


def test_rules_that_are_no_composition_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = tmp_path / "rules.tsv"
    rules.write_text("66 6F 6F\t62 61 72\n41\t61\n")
    options: dict[str, Any] = {"vocab_size": 20, "hard_vocab_limit": False}
    lines = ["foo bar baz A"] * 9
    tokenizer = sentencepiece_tokenizer(sentencepiece_model(lines, **options), "usual")
    assert not caplog.records
    model = sentencepiece_model(lines, normalization_rule_tsv=str(rules), **options)
    tokenizer = sentencepiece_tokenizer(model, "with rules")
    assert "1 of the SentencePiece model's rules, such as 'foo' to 'bar'" in caplog.text
    assert tokenizer.encode("A") == tokenizer.encode("a")
