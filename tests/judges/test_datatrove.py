"""datatrove's Megatron writer and MinHash deduplication beside ours, and megatron-core's reader."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import struct
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.text.deduplicate.shingles import Shingler
from megatron_deberta.text.deduplicate.sign import Settings, make_sketches, recall
from megatron_deberta.tokenizer import load_tokenizer
from tests.support.corpus import corpus_path
from tests.support.duplicates import distinct_texts, edited, read_jsonl, run, write_jsonl
from tests.support.judges import importable, record
from tests.support.machine_text import documents
from tests.support.tiny_models import tiny_tokenizer

pytestmark = pytest.mark.slow

REQUIREMENTS = (
    "datatrove==0.10.1", "dill==0.4.1", "humanize==4.15.0", "loguru==0.7.3",
    "multiprocess==0.70.19",
)  # fmt: skip
SIGMAS = 4
Pairs = set[tuple[int, int]]
WRITERS = {"ours": "ours", "theirs": "datatrove"}


@pytest.fixture(scope="module", autouse=True)
def release() -> Iterator[str]:
    with importable(*REQUIREMENTS) as release:
        yield release


def datatrove_documents(texts: Sequence[str]) -> list[Any]:
    from datatrove.data import Document

    return [Document(text=text, id=str(number)) for number, text in enumerate(texts)]


def megatron_reader(prefix: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset
    return MegatronDataset(prefix)


def texts_of_shards() -> list[str]:
    """Return texts of this machine with odd ones between them."""
    odd = ("a", "\u00e9te\u0301 \u4f60\u597d \U0001f600", "line\none\t\ttwo \x0b", "A" * 3000)
    return [text for pair in zip(documents()[:60], itertools.cycle(odd)) for text in pair]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str, str, Path]:
    """Return texts, the prefixes of our and datatrove's shard of them, and the tokenizer."""
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer

    folder = tmp_path_factory.mktemp("shards")
    texts = texts_of_shards()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "corpus.jsonl").write_text(lines)
    tokenizer = folder / "tokenizer"
    tiny_tokenizer().save(str(tokenizer))
    arguments = ["--input", str(folder / "corpus.jsonl"), "--tokenizer", str(tokenizer)]
    assert main(["preprocess", *arguments, "--output", str(folder / "ours"), "--workers", "0"]) == 0

    # As documents are in shards: without [CLS] and [SEP], which packing adds.
    plain = json.loads((tokenizer / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "plain.json").write_text(json.dumps(plain))
    writer = MegatronDocumentTokenizer(
        str(folder), save_filename="theirs", tokenizer_name_or_path=str(folder / "plain.json"),
        eos_token=None, batch_size=7,
    )  # fmt: skip
    writer.run(datatrove_documents(texts))
    return texts, str(folder / "ours_text_document"), str(folder / "theirs_00000_tokens"), tokenizer


def test_shards_of_both_writers_are_the_same(
    shards: tuple[list[str], str, str, Path], release: str
) -> None:
    texts, ours, theirs, _ = shards
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
    record(
        "datatrove", release,
        "MegatronDocumentTokenizer: .bin and .idx of our preprocess, with the same tokenizer",
        "same bytes", "same bytes", len(texts),
    )  # fmt: skip


@pytest.mark.parametrize("writer", ["ours", "theirs"])
def test_megatron_core_and_we_read_the_same(
    writer: str, shards: tuple[list[str], str, str, Path]
) -> None:
    texts, ours, theirs, tokenizer = shards
    prefix = ours if writer == "ours" else theirs
    own, megatron = IndexedDataset(prefix), megatron_reader(prefix)
    encode = load_tokenizer(str(tokenizer)).encode
    expected = [list(encode(text)) for text in texts]
    assert own.num_documents == len(texts) == len(megatron.document_indices) - 1
    assert [own.document(i).tolist() for i in range(len(texts))] == expected
    assert [row.tolist() for row in megatron] == expected
    assert megatron.document_indices.tolist() == own.document_boundaries.tolist()
    assert megatron.sequence_lengths.tolist() == own.sequence_lengths.tolist()
    assert main(["verify", prefix, "--tokenizer", str(tokenizer)]) == 0
    record(
        "megatron-core", version_of("megatron-core"),
        f"IndexedDataset: ids and documents of a shard of {WRITERS[writer]}, beside our reader",
        "equal", "equal", len(texts),
    )  # fmt: skip


@pytest.mark.parametrize("token_size", [2, 4])
def test_ids_of_large_vocabularies(token_size: int, tmp_path: Path) -> None:
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    rows = [[5, 6, 65_535], [7], list(range(40))]
    if token_size == 4:
        rows.append([65_536, 2**31 - 1])
    file = MegatronTokenizedFile(str(tmp_path), "shard", token_size=token_size)
    for row in rows:
        file.write(row)
    file.close()
    prefix = str(tmp_path / "shard")
    shard = IndexedDataset(prefix)
    assert shard.dtype == (np.int32 if token_size == 4 else np.uint16)
    assert [shard.document(i).tolist() for i in range(len(rows))] == rows
    assert main(["verify", prefix]) == 0


class MinHash:
    """Near duplicates as datatrove's first two steps find them, with the parameters of ours.

    Args:
        texts: the documents.
        settings: of our deduplication.
        folder: for files.

    Attributes:
        pairs: documents that share a band.
    """

    def __init__(self, texts: Sequence[str], settings: Settings, folder: Path) -> None:
        from datatrove.pipeline.dedup.minhash import (
            MinhashConfig,
            MinhashDedupBuckets,
            MinhashDedupSignature,
        )
        from datatrove.utils.hashing import HashConfig
        from datatrove.utils.text import TextNormConfig
        from datatrove.utils.word_tokenizers import WordTokenizer

        class Words(WordTokenizer):
            """Words as ours: between white space."""

            def word_tokenize(self, text: str) -> list[str]:
                return text.split()

            def sent_tokenize(self, text: str) -> list[str]:
                raise NotImplementedError

            def span_tokenize(self, text: str) -> list[tuple[int, int]]:
                raise NotImplementedError

        config = MinhashConfig(
            n_grams=settings.ngram,
            num_buckets=settings.bands,
            hashes_per_bucket=settings.rows,
            hash_config=HashConfig(hash_fc="sha1"),
            # Lower case and single spaces, as ours; composed letters stay as they are.
            norm_config=TextNormConfig(
                remove_punctuation=False, norm_unicode_diacritics=False, norm_numbers=False
            ),
        )
        signatures, buckets = str(folder / "signatures"), str(folder / "buckets")
        MinhashDedupSignature(signatures, config, Words()).run(datatrove_documents(texts))
        step = MinhashDedupBuckets(signatures, buckets, config=config)
        # A pair of neighbours in a bucket is written; buckets are the chains of these.
        self.pairs: Pairs = set()
        for band in range(settings.bands):
            step.run(None, rank=band, world_size=settings.bands)
            (file,) = Path(buckets).glob(f"{band:05d}_*.dups")
            chain: list[int] = []
            for _, earlier, _, later in struct.iter_unpack("<4I", file.read_bytes()):
                chain = [*chain, later] if chain and chain[-1] == earlier else [earlier, later]
                self.pairs |= {ordered(other, later) for other in chain[:-1]}


def ordered(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def true_similarities(texts: Sequence[str], ngram: int) -> dict[tuple[int, int], float]:
    """Return the Jaccard similarity of all documents that share a run of words."""
    runs: list[set[tuple[str, ...]]] = []
    for text in texts:
        words = text.lower().split()
        starts = range(max(len(words) - ngram + 1, 1))
        runs.append({tuple(words[start : start + ngram]) for start in starts})
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, each in enumerate(runs):
        for gram in each:
            holders[gram].append(number)
    shared = Counter(
        pair for numbers in holders.values() for pair in itertools.combinations(numbers, 2)
    )
    return {
        (a, b): count / (len(runs[a]) + len(runs[b]) - count) for (a, b), count in shared.items()
    }


def shared_bands(texts: Sequence[str], settings: Settings) -> Pairs:
    """Return the documents that share a band of our sketches, by comparing all of them."""
    sketches = make_sketches(
        [hashes for _, hashes in Shingler(settings.ngram).many(texts)], settings.seed
    )
    pairs: Pairs = set()
    for band in range(settings.bands):
        buckets: dict[bytes, list[int]] = defaultdict(list)
        for number, row in enumerate(sketches):
            values = row[band * settings.rows : (band + 1) * settings.rows]
            buckets[values.tobytes()].append(number)
        for numbers in buckets.values():
            pairs |= set(itertools.combinations(numbers, 2))
    return pairs


def expected_by_bands(similarities: Sequence[float], settings: Settings) -> tuple[float, float]:
    """Return mean and standard deviation of the number of pairs that share a band."""
    chances = [recall(each, settings.rows, settings.bands) for each in similarities]
    return sum(chances), math.sqrt(sum(p * (1 - p) for p in chances))


def generated() -> list[str]:
    """Return 200 texts, and copies with one to six of their 120 words replaced."""
    originals = distinct_texts(200)
    return originals + [edited(text, (n % 6 + 1) / 120, n) for n, text in enumerate(originals)]


def planted() -> list[str]:
    with gzip.open(corpus_path("dedup_eval.jsonl.gz")) as stream:
        return [json.loads(line)["text"] for line in stream]


@pytest.mark.parametrize(
    ("texts_of", "threshold", "what"),
    [
        (generated, 0.7, "400 generated texts"),
        pytest.param(generated, 0.8, "400 generated texts", marks=pytest.mark.nightly),
        (planted, 0.7, "1,760 passages with planted duplicates"),
    ],
)
def test_every_pair_that_one_finds_alone_is_explained(
    texts_of: Callable[[], list[str]], threshold: float, what: str, tmp_path: Path, release: str
) -> None:
    """Of pairs at the threshold or above, both find what shares a band of their own hashes."""
    texts = texts_of()
    settings = Settings(threshold=threshold)
    true = true_similarities(texts, settings.ngram)
    similar = {pair for pair, value in true.items() if value >= threshold}
    theirs = MinHash(texts, settings, tmp_path).pairs
    bands = shared_bands(texts, settings)

    # Theirs are candidates: every one shares words, and some are below the threshold.
    assert theirs <= true.keys()
    assert bands <= true.keys()
    for found in (theirs, bands):
        mean, deviation = expected_by_bands(list(true.values()), settings)
        assert abs(len(found) - mean) <= SIGMAS * deviation + 1
        # Of those at the threshold or above, bands miss so many by chance.
        missed = len(similar - found)
        mean, deviation = expected_by_bands([true[pair] for pair in similar], settings)
        assert missed <= len(similar) - mean + SIGMAS * deviation + 1

    # Ours compares candidates exactly: every removed document is at the threshold or above.
    path = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])
    run([path], tmp_path / "out", settings=settings)
    removed = {line["document"]: line for line in read_jsonl(tmp_path / "out" / "removed.jsonl")}
    assert len(removed) > 50
    for number, line in removed.items():
        kept = line["kept"]["document"]
        value = true[ordered(number, kept)]
        assert line["jaccard"] == pytest.approx(value, abs=1e-6)
        assert value >= threshold
        assert kept not in removed
    ours_alone = {ordered(n, line["kept"]["document"]) for n, line in removed.items()} - theirs
    assert all(true[pair] < 1 for pair in ours_alone)
    # Both documents stay only where they share no band of our sketches.
    stays = {pair for pair in similar if not removed.keys() & set(pair)}
    assert not stays & bands
    below = len(theirs - similar)
    record(
        "datatrove", release,
        f"MinHash with {settings.bands} bands of {settings.rows} beside our deduplicate at "
        f"threshold {threshold}, {what}: pairs at the threshold or above",
        f"{len(ours_alone)} found by ours alone, {len(stays & theirs)} by datatrove alone; "
        f"{below} of its candidates are below the threshold",
        f"chance of the bands, {SIGMAS} standard deviations", len(similar),
    )  # fmt: skip
