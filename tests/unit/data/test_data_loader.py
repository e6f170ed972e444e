"""Loaders: samples do not depend on layout, workers or resume point; failures are reported."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_deberta.config.schema import (
    DataConfig,
    RunConfig,
    TokenizerConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.build import (
    build_loaders,
    open_corpora,
    parse_prefixes,
    tokenizer_path,
)
from megatron_deberta.data.dataset.unigram import (
    shard_log_probabilities,
    unigram_cross_entropy,
    unigram_log_probabilities,
)
from megatron_deberta.data.loader import StepSampler, TrainLoader
from megatron_deberta.data.shards.manifest import read_manifest
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.errors import ConfigError, DataError


def tensors(batch):
    """The tensors that every batch has."""
    inputs = batch.inputs
    return (
        inputs.input_ids,
        inputs.is_token,
        batch.masked_positions,
        batch.labels,
        batch.sample_index,
    )


@pytest.fixture
def config(write_shard, random_documents):
    return RunConfig(
        data=DataConfig(
            train=(write_shard(random_documents(60)),),
            validation_fraction=0.2,
            sequence_length=32,
            num_workers=0,
        ),
        train=TrainConfig(global_batch_size=12, micro_batch_size=2, eval_batches=2, seed=7),
    )


def with_(config, **sections):
    changed = {
        name: replace(getattr(config, name), **changes) for name, changes in sections.items()
    }
    return replace(config, **changed)


def rows_of(batch):
    """Rows by sample index, as bytes of every field."""
    return {
        int(sample): tuple(tensor[row].numpy().tobytes() for tensor in tensors(batch))
        for row, sample in enumerate(batch.sample_index)
    }


def global_steps(config, vocabulary, dp_size, num_steps, consumed=0):
    """What all ranks together see in each step, in rank order."""
    steps = [[] for _ in range(num_steps)]
    for dp_rank in range(dp_size):
        loader, _ = build_loaders(config, vocabulary, dp_rank, dp_size, consumed)
        for step, batches in zip(steps, loader, strict=False):
            for batch in batches:
                step.extend(rows_of(batch).items())
    return steps


def test_batch_fields(config, vocabulary):
    loader, _ = build_loaders(config, vocabulary, 0, 1, 0)
    step = next(iter(loader))
    assert len(step) == 6
    for batch in step:
        assert batch.inputs.input_ids.shape == batch.inputs.is_token.shape == (2, 32)
        assert batch.masked_positions.shape == batch.labels.shape == (2, 5)
        assert batch.inputs.is_token.dtype == torch.bool
        for tensor in (
            batch.inputs.input_ids, batch.masked_positions, batch.labels, batch.sample_index
        ):  # fmt: skip
            assert tensor.dtype == torch.int64
        assert batch.inputs.document_ids is batch.inputs.position_ids is None
        assert ((batch.masked_positions >= 0) == (batch.labels != -100)).all()
        assert (batch.inputs.input_ids[~batch.inputs.is_token] == 0).all()
        assert batch.num_targets == int((batch.labels != -100).sum())


def test_a_mask_without_padding_is_dropped(config, vocabulary):
    config = with_(config, train={"eval_batches": 100})
    batches = list(build_loaders(config, vocabulary, 0, 1, 0)[1])
    masks = [batch.inputs.attention_mask for batch in batches]
    assert {mask is None for mask in masks} == {True, False}
    assert not any(mask.all() for mask in masks if mask is not None)
    moved = [batch.to("meta").inputs.attention_mask for batch in batches]
    assert [mask is None for mask in moved] == [mask is None for mask in masks]


def test_moving_a_batch_moves_every_tensor(config, vocabulary):
    config = with_(config, data={"attend_across_documents": False})
    batch = next(iter(build_loaders(config, vocabulary, 0, 1, 0)[0]))[0]
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    found = (*tensors(moved), moved.inputs.document_ids)
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert batch.inputs.input_ids.device.type == "cpu"


def test_document_and_position_ids(config, vocabulary):
    config = with_(config, data={"attend_across_documents": False})
    for batch in next(iter(build_loaders(config, vocabulary, 0, 1, 0)[0])):
        for row in range(2):
            real = int(batch.inputs.is_token[row].sum())
            document, position, expected = 0, 0, []
            # Separators may be masked over? No: special tokens never are.
            for index in range(32):
                expected.append((document, position))
                position += 1
                if index < real - 1 and batch.inputs.input_ids[row, index] == vocabulary.sep_id:
                    document, position = document + 1, 0
            found = zip(
                batch.inputs.document_ids[row].tolist(),
                batch.inputs.position_ids[row].tolist(),
                strict=1,
            )
            assert list(found) == expected


def test_another_batch_size_continues_with_the_next_sample(config, vocabulary):
    whole = [row for step in global_steps(config, vocabulary, 1, 4) for row in step]
    other = with_(config, train={"global_batch_size": 6})
    rest = [row for step in global_steps(other, vocabulary, 1, 4, 24) for row in step]
    assert rest == whole[24:]


def test_killed_worker_is_an_error(config, vocabulary):
    before = signal.getsignal(signal.SIGCHLD)
    others = set(torch.multiprocessing.active_children())  # ranks of other tests
    loader, _ = build_loaders(with_(config, data={"num_workers": 1}), vocabulary, 0, 1, 0)
    steps = iter(loader)
    next(steps)
    assert signal.getsignal(signal.SIGCHLD) == before
    (worker,) = set(torch.multiprocessing.active_children()) - others
    os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.1)
    assert worker.is_alive()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a loader process died"):
        list(itertools.islice(steps, 1000))


def test_the_papers_batch_keeps_few_files_open(config, vocabulary):
    """Tensors from workers are shared memory, which takes a descriptor each."""
    sizes = {"global_batch_size": 256, "micro_batch_size": 1}
    config = with_(config, train=sizes, data={"num_workers": 1})
    before = len(os.listdir("/proc/self/fd"))
    steps = iter(build_loaders(config, vocabulary, 0, 1, 0)[0])
    held = next(steps)
    assert len(held) == 256
    assert len(os.listdir("/proc/self/fd")) - before < 300
    assert not any(batch.inputs.input_ids.is_shared() for batch in held)
    steps.close()


def test_a_micro_batch_beyond_the_memory_is_refused(config, vocabulary):
    sizes = {"global_batch_size": 10**9, "micro_batch_size": 10**9}
    config = with_(config, train=sizes)
    message = r"train\.micro_batch_size=1000000000: .* takes about 1,431 GiB .*this machine has"
    with pytest.raises(ConfigError, match=message):
        build_loaders(config, vocabulary, 0, 1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_too_little_memory_for_a_micro_batch_names_the_key(workers):
    class Exhausted:
        def build(self, samples):
            raise MemoryError("Unable to allocate 95.4 GiB")

    sampler = StepSampler(global_batch_size=8, micro_batch_size=4, dp_rank=0, dp_size=1)
    loader = TrainLoader(Exhausted(), sampler, 0, workers, pin_memory=False)
    with pytest.raises(DataError, match=r"train\.micro_batch_size=4: .*95\.4 GiB.*lower it"):
        next(iter(loader))


def test_workers_end_by_themselves(config, vocabulary):
    """Killed by the rank, one in a hundred would hold a lock that torch then waits for."""
    others = set(torch.multiprocessing.active_children())
    loader, _ = build_loaders(with_(config, data={"num_workers": 2}), vocabulary, 0, 1, 0)
    for _ in range(5):
        steps = iter(loader)
        next(steps)
        workers = set(torch.multiprocessing.active_children()) - others
        steps.close()
        assert [worker.exitcode for worker in workers] == [0, 0]


EXIT_WITH_LIVE_WORKERS = """
import sys
sys.path.insert(0, {folder!r})
import multiprocessing, os, pickle, signal
loader = pickle.loads(bytes.fromhex({loader!r}))
steps = iter(loader)
next(steps)
for worker in multiprocessing.active_children():
    os.kill(worker.pid, signal.SIGSTOP)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [("raise SystemExit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_rank_that_ends_with_workers_alive_ends_at_once(config, vocabulary, end, code):
    """Workers ignore SIGTERM, with which Python would stop them; also proves spawn safety."""
    loader, _ = build_loaders(with_(config, data={"num_workers": 2}), vocabulary, 0, 1, 0)
    script = EXIT_WITH_LIVE_WORKERS.format(
        folder=os.getcwd(), loader=pickle.dumps(loader).hex(), end=end
    )
    # Returns once nobody has its output open any more: workers hold what the rank held. They are
    # stopped, so that they cannot find out by themselves that it is gone.
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert done.returncode == code


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_found_while_loading_is_one_line(config, write_shard, vocabulary, workers):
    prefix = write_shard([np.array([5, 6, 250, 7])], "bad")
    good = config.data.train[0]
    config = with_(config, data={"train": (good, prefix), "validation_fraction": 0.0})
    config = with_(config, data={"num_workers": workers})
    loader, validation = build_loaders(config, vocabulary, 0, 1, 0)
    assert validation is None
    message = r"^[^,]*bad\.bin: byte 4: id 250 is outside the vocabulary"
    with pytest.raises(DataError, match=message) as caught:
        list(itertools.islice(loader, 20))
    assert "\n" not in str(caught.value)
    corpora = open_corpora(config, vocabulary, hashes=False)
    with pytest.raises(DataError, match=message):
        unigram_log_probabilities(corpora.train, corpora.weights, vocabulary.size)


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 2), (2, 3), (3, 1), (4, 3)])
def test_validation_is_fixed_and_ranks_stay_together(config, vocabulary, dp_size, micro):
    config = with_(config, train={"eval_batches": 100, "micro_batch_size": micro})
    found, lengths = {}, set()
    for dp_rank in range(dp_size):
        _, loader = build_loaders(config, vocabulary, dp_rank, dp_size, 0)
        batches = list(loader)
        lengths |= {len(batches), len(loader)}
        for batch in batches:
            filler = batch.sample_index == -1
            assert (batch.masked_positions[filler] == -1).all()
            assert batch.inputs.is_token.any(dim=1).all()
            found.update(rows_of(batch))
    found.pop(-1, None)
    _, alone = build_loaders(with_(config, train={"micro_batch_size": 1}), vocabulary, 0, 1, 999)
    expected = {}
    for batch in alone:
        expected.update(rows_of(batch))
    assert found == expected
    assert len(lengths) == 1
    assert sorted(found) == list(range(alone.num_samples))


def test_validation_is_bounded(config, vocabulary):
    config = with_(config, train={"global_batch_size": 2, "micro_batch_size": 1, "eval_batches": 3})
    _, loader = build_loaders(config, vocabulary, 0, 1, 0)
    assert loader.num_samples == len(loader) == 6


def test_separate_validation_shard(config, write_shard, random_documents, vocabulary):
    other = write_shard(random_documents(9, 5), "held-out")
    corpora = open_corpora(with_(config, data={"validation": (other,)}), vocabulary, hashes=True)
    assert (len(corpora.train[0]), len(corpora.validation)) == (60, 9)


def test_blend_of_shards(config, write_shard, random_documents, vocabulary):
    second = write_shard(random_documents(30, 8), "second")
    blend = ("3", config.data.train[0], "1", second)
    config = with_(config, data={"train": blend})
    corpora = open_corpora(config, vocabulary, hashes=False)
    assert corpora.weights == (3.0, 1.0)
    assert [len(corpus) for corpus in corpora.train] == [48, 24]
    assert len(corpora.validation) == 12 + 6
    assert sum(corpora.validation.lengths) + sum(
        corpus.num_tokens for corpus in corpora.train
    ) == sum(document.size for document in random_documents(60) + random_documents(30, 8))
    expected = global_steps(config, vocabulary, 1, 4)
    assert global_steps(config, vocabulary, 2, 2, 24) == expected[2:]


def test_duplicate_shard_is_refused(config, vocabulary):
    (prefix,) = config.data.train
    same = f"{os.path.dirname(prefix)}/./shard"
    for data in (
        {"train": (prefix, same)},
        {"train": ("1", prefix, "2", same)},
        {"validation": (same,)},
    ):
        with pytest.raises(ConfigError, match="listed twice"):
            open_corpora(with_(config, data=data), vocabulary, hashes=False)


def test_shards_are_named_by_prefix_file_or_folder(config, vocabulary, write_shard):
    (prefix,) = config.data.train
    other = write_shard([np.arange(4, 50)], "other/second")
    folder = os.path.dirname(other)
    by_file = with_(config, data={"train": (f"{prefix}.bin",), "validation": (folder,)})
    corpora = open_corpora(by_file, vocabulary, hashes=True)
    assert (len(corpora.train[0]), len(corpora.validation)) == (60, 1)
    assert tokenizer_path(by_file) == "tokenizer-dir"
    train = ("2", folder, "1", f"{prefix}.manifest.json")
    blend = with_(config, data={"train": train, "validation_fraction": 0.0})
    assert [len(corpus) for corpus in open_corpora(blend, vocabulary, False).train] == [1, 60]


def test_prefixes_and_weights():
    assert parse_prefixes(("a", "b"), "data.train") == ([["a", "b"]], [1.0])
    assert parse_prefixes(("0.5", "a", "2", "b"), "data.train") == ([["a"], ["b"]], [0.5, 2.0])
    # Names that Python reads as numbers
    assert parse_prefixes(("2024_1", "nan"), "data.train") == ([["2024_1", "nan"]], [1.0])
    for wrong in (("a", "0.5"), ("0.5", "a", "b"), ("1", "2"), ("1", "a", "b", "c")):
        with pytest.raises(ConfigError, match="data.train is"):
            parse_prefixes(wrong, "data.train")
    with pytest.raises(ConfigError, match="data.train is empty"):
        parse_prefixes((), "data.train")


def test_tokenizer_is_the_shards_own_by_default(config):
    assert tokenizer_path(config) == "tokenizer-dir"
    named = replace(config, tokenizer=TokenizerConfig(path="elsewhere"))
    assert tokenizer_path(named) == "elsewhere"
    os.remove(f"{config.data.train[0]}.manifest.json")
    assert read_manifest(config.data.train[0]) is None
    with pytest.raises(ConfigError, match="set tokenizer.path"):
        tokenizer_path(config)


def test_a_missing_shard_is_named_with_a_similar_one(config):
    (prefix,) = config.data.train
    for end in ("bin", "idx", "manifest.json"):
        os.rename(f"{prefix}.{end}", f"{prefix}_text_document.{end}")
    message = rf"{prefix}\.idx: No such file .*; did you mean {prefix}_text_document\.idx\?"
    with pytest.raises(DataError, match=message):
        tokenizer_path(config)


def test_a_misspelled_shard_is_named_with_the_one_that_is_meant(config):
    (prefix,) = config.data.train
    wrong = replace(config, data=replace(config.data, train=[f"{prefix[:-1]}_"]))
    with pytest.raises(DataError, match=rf"No such file .*; did you mean {prefix}\.idx\?"):
        tokenizer_path(wrong)
    os.remove(f"{prefix}.idx")
    # Not the .bin file
    with pytest.raises(DataError, match=r"No such file or directory; give the shard's prefix$"):
        IndexedDataset(prefix)


def test_text_in_place_of_a_shard_is_named(config, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.")
    config = with_(config, data={"train": [str(book)]})
    with pytest.raises(DataError, match=r"book\.txt is no shard; make one of text with preprocess"):
        tokenizer_path(config)


def test_hashes_are_checked_on_request(config, vocabulary):
    config = with_(config, data={"verify_hashes": True})
    build_loaders(config, vocabulary, 0, 1, 0)
    with open(f"{config.data.train[0]}.bin", "r+b") as stream:
        stream.write(b"\x09\x00")
    with pytest.raises(DataError, match=r"shard\.bin: SHA-256"):
        build_loaders(config, vocabulary, 0, 1, 0)


def test_unigram_cross_entropy_equals_a_count_by_hand(write_shard, vocabulary):
    documents = [np.array([5, 5, 5, 6]), np.array([6, 7] * 30)]
    config = RunConfig(
        data=DataConfig(
            train=(write_shard(documents),), validation_fraction=0.5, sequence_length=16
        ),
        train=TrainConfig(global_batch_size=2, micro_batch_size=2, seed=1),
    )
    corpora = open_corpora(config, vocabulary, hashes=False)
    _, validation = build_loaders(config, vocabulary, 0, 1, 0, corpora)
    (train,) = corpora.train
    seen = train.tokens(int(train.starts(np.array([0]))[0]), int(train.lengths[0]))
    counts = np.bincount(seen, minlength=vocabulary.size) + 1.0
    log_p = unigram_log_probabilities(corpora.train, corpora.weights, vocabulary.size)
    np.testing.assert_allclose(log_p, np.log(counts / counts.sum()))
    labels = [int(x) for batch in validation for x in batch.labels.flatten() if x != -100]
    loss, targets = unigram_cross_entropy(log_p, validation)
    assert targets == len(labels) > 0
    assert loss == pytest.approx(-sum(log_p[label] for label in labels))


def test_log_probabilities_of_shards_equal_a_count_by_hand(write_shard):
    shards = [
        IndexedDataset(write_shard([np.array(tokens)], name=name))
        for name, tokens in (("a", [5, 5, 6]), ("b", [5, 8]))
    ]
    log_p = shard_log_probabilities(shards, 12)
    counts = np.array([1, 1, 1, 1, 1, 4, 2, 1, 2, 1, 1, 1])
    np.testing.assert_allclose(log_p, np.log(counts / 17))
    with pytest.raises(DataError, match="token id 8, but the tokenizer has 8 ids"):
        shard_log_probabilities(shards, 8)


def test_unigram_counts_in_chunks_and_up_to_a_limit(
    config, write_shard, random_documents, vocabulary, monkeypatch
):
    corpora = open_corpora(config, vocabulary, hashes=False)
    size = vocabulary.size
    whole = unigram_log_probabilities(corpora.train, (1.0,), size)
    monkeypatch.setattr("megatron_deberta.data.dataset.unigram._CHUNK_TOKENS", 50)
    np.testing.assert_allclose(unigram_log_probabilities(corpora.train, (1.0,), size), whole)
    first = corpora.train[0].tokens(0, 0)
    assert first.size == 0
    limited = np.exp(unigram_log_probabilities(corpora.train, (1.0,), size, max_tokens=1))
    assert limited.sum() == pytest.approx(1.0)
    assert (limited > limited.min() * 1.5).sum() <= corpora.train[0].lengths[0]


def test_unigram_of_a_blend_weighs_components(write_shard, vocabulary):
    first = write_shard([np.full(4000, 5), np.full(4000, 5)], "first")
    second = write_shard([np.full(8000, 6)], "second")
    config = RunConfig(
        data=DataConfig(train=("3", first, "1", second), validation_fraction=0.0),
    )
    corpora = open_corpora(config, vocabulary, hashes=False)
    p = np.exp(unigram_log_probabilities(corpora.train, corpora.weights, vocabulary.size))
    assert p[5] / p[6] == pytest.approx(3, rel=0.01)
