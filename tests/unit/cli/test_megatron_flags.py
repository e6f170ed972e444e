"""Megatron-LM's flags give the bytes that its script writes."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import ByteLevelBPETokenizer

from megatron_deberta.cli.main import main as own_command
from megatron_deberta.cli.megatron_flags import UNSUPPORTED, main
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.machine_text import documents

Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers of all supported types, and a corpus with empty documents."""
    folder = tmp_path_factory.mktemp("megatron")
    train_sentencepiece(documents()[:40], str(folder / "hf"), vocab_size=500)
    (folder / "sp").mkdir()
    shutil.copy(folder / "hf" / "spm.model", folder / "sp" / "a.model")
    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator(
        documents()[:20], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False
    )
    (folder / "gpt2").mkdir()
    pieces.save_model(str(folder / "gpt2"), "gpt2")
    texts = documents()[:30]
    texts[3] = " "
    texts[0] = texts[-1] = ""
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as stream:
        for index, text in enumerate(texts):
            stream.write(json.dumps({"text": text, "title": f"Title {index}"}) + "\n")
    return folder


def types(folder: Path) -> dict[str, tuple[list[str], Encode, int, int]]:
    """Flags, encoder, vocabulary size and end-of-document id of each type of tokenizer."""
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    model = str(folder / "sp" / "a.model")
    pieces = SentencePieceProcessor(model_file=model)
    names = [str(folder / "gpt2" / name) for name in ("gpt2-vocab.json", "gpt2-merges.txt")]
    gpt2 = ByteLevelBPETokenizer(*names)
    hf = HuggingFaceTokenizer(str(folder / "hf"))
    return {
        "SentencePieceTokenizer": (
            ["--tokenizer-model", model], pieces.encode_as_ids, len(pieces), pieces.eos_id(),
        ),
        "GPT2BPETokenizer": (
            ["--vocab-file", names[0], "--merge-file", names[1]],
            lambda text: gpt2.encode(text).ids, gpt2.get_vocab_size(),
            gpt2.token_to_id("<|endoftext|>"),
        ),
        "HuggingFaceTokenizer": (
            ["--tokenizer-model", str(folder / "hf"), "--tokenizer-hf-no-include-special-tokens"],
            hf.text_to_ids, hf.vocab_size, hf.eod,
        ),
    }  # fmt: skip


def write_as_megatron(
    folder: Path, output: Path, keys: list[str], encode: Encode, vocab_size: int, eod: int | None
) -> None:
    """Write what the script writes, with megatron-core's builder."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    for key in keys:
        prefix = f"{output}_{key}_document"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
        with gzip.open(folder / "corpus.jsonl.gz", "rt") as stream:
            for line in stream:
                ids = encode(json.loads(line)[key])
                ids += [eod] if ids and eod is not None else []
                builder.add_document(ids, [len(ids)] if ids else [])
        builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("eod", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("SentencePieceTokenizer", 1), ("GPT2BPETokenizer", 1), ("HuggingFaceTokenizer", 2)],
)
def test_bytes_are_those_of_megatron(
    folder: Path, tmp_path: Path, kind: str, workers: int, *, eod: bool
) -> None:
    flags, encode, vocab_size, eod_id = types(folder)[kind]
    keys = ["text", "title"]
    write_as_megatron(folder, tmp_path / "m", keys, encode, vocab_size, eod_id if eod else None)
    arguments = [
        "--input", str(folder / "corpus.jsonl.gz"), "--output-prefix", str(tmp_path / "o"),
        "--json-keys", *keys, "--tokenizer-type", kind, *flags, "--workers", str(workers),
        "--log-interval", "100", "--partitions", "2", "--keep-sequential-samples",
        *(["--append-eod"] if eod else []),
    ]  # fmt: skip
    assert main(arguments) == 0
    for key in keys:
        for end in ("bin", "idx"):
            name = f"_{key}_document.{end}"
            assert (tmp_path / f"o{name}").read_bytes() == (tmp_path / f"m{name}").read_bytes()
    assert own_command(["verify", str(tmp_path / "o_text_document")]) == 0
    shard = IndexedDataset(str(tmp_path / "o_text_document"))
    assert [len(shard.document(index)) for index in (0, 29)] == [0, 0]


def test_eod_ends_the_last_sentence(folder: Path, tmp_path: Path) -> None:
    def lengths(name: str, *options: str) -> Any:
        arguments = ["--input", str(folder / "corpus.jsonl.gz"), "--tokenizer", str(folder / "hf")]
        output = str(tmp_path / name)
        command = ["preprocess", *arguments, "--output", output, "--sentences", "--workers", "0"]
        assert own_command([*command, *options]) == 0
        return IndexedDataset(f"{output}_text_sentence")

    plain, ended = lengths("plain"), lengths("ended", "--append-eod", "[SEP]")
    added = ended.sequence_lengths - plain.sequence_lengths
    last = plain.document_boundaries[1:] - 1
    assert added[last].tolist() == [1] * len(last)
    assert added.sum() == len(last)
    assert ended.document(4)[-1] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split-sentences"], "--split-sentences is not supported: .*preprocess --sentences"),
        (["--vocab-extra-ids=10"], "--vocab-extra-ids is not supported: add the tokens"),
        (["--tokenizer", "x"], "--tokenizer is not supported: .*use megatron-deberta preprocess"),
        (["--made-up"], "unrecognized arguments: --made-up"),
        (["--partitions", "2"], "--partitions 2 is not supported without --keep-seq.*; remove it"),
        (["--json-keys", "a,b"], "separate keys with spaces"),
        (["--tokenizer-type", "BertWordPieceCase"], "BertWordPieceCase is not supported .*convert"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "--vocab-file is missing; .*needs it"),
        (["--tokenizer-type", "HuggingFaceTokenizer"], "add --tokenizer-hf-no-include-special"),
        (["--tokenizer-model", "absent"], "absent: no such file or folder"),
    ],
)
def test_unsupported_flags_are_refused_by_name(
    arguments: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = [
        "--input", str(folder / "corpus.jsonl.gz"), "--output-prefix", str(tmp_path / "o"),
        "--tokenizer-type", "SentencePieceTokenizer",
        "--tokenizer-model", str(folder / "sp" / "a.model"),
    ]  # fmt: skip
    assert main([*base, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


def test_refused_flags_are_not_accepted() -> None:
    from megatron_deberta.cli.megatron_flags import build_parser

    assert not UNSUPPORTED.keys() & build_parser()._option_string_actions.keys()


def test_unusable_record_ends_the_command(folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "good"}\n' * 3000 + '{"text": 5}\n')
    arguments = [
        "--input", str(corpus), "--output-prefix", str(tmp_path / "o"), "--workers", "1",
        "--tokenizer-type", "GPTSentencePieceTokenizer",
        "--tokenizer-model", str(folder / "sp" / "a.model"),
    ]  # fmt: skip
    assert main(arguments) == 1
    assert not (tmp_path / "o_text_document.idx").exists()
