"""Random resume points: seed, step, ranks, workers, format and epoch do not change the samples."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from megatron_deberta.config import validate_for_world
from megatron_deberta.config.phases import segment_at, segments
from megatron_deberta.config.schema import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.build import (
    open_corpora,
    train_loader,
    training_rows,
    validation_loader,
)
from megatron_deberta.data.dataset import index_cache
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.dataset.rows import ShiftedRows
from megatron_deberta.data.sample_log import SampleLog, check_sample_log
from megatron_deberta.data.shards.writer import write_shard

PACKINGS = ["full_sentences", "doc_sentences", "segment_pair", "sentence_pair"]
CUTS = 20
"""Number of resume points per format."""
STEPS = 4
WITH_WORKERS = 10
"""Interval of cuts whose batches are built by worker processes, which are slow to start."""


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Shards of few sentences, so that six steps cross several epochs."""
    draw = np.random.default_rng(3)
    found = []
    for number in range(6):
        prefix = str(tmp_path_factory.mktemp("shards") / f"text{number}_sentence")
        documents = [
            [
                draw.integers(4, 189, int(draw.integers(1, 14)))
                for _ in range(int(draw.integers(1, 9)))
            ]
            for _ in range(int(draw.integers(12, 25)))
        ]
        write_shard(prefix, documents, np.uint16)
        found.append(prefix)
    return found


def random_config(draw, packing, prefixes, run_dir):
    chosen = draw.choice(prefixes, 2, replace=False).tolist()
    blend = [str(draw.integers(1, 5)), chosen[0], str(draw.integers(1, 5)), chosen[1]]
    pairs = packing.endswith("pair")
    config = RunConfig(
        model=ModelConfig(next_sentence_head=pairs, type_vocab_size=2 if pairs else 0),
        data=DataConfig(
            train=tuple(draw.choice([0, 1, 2]) and blend or chosen[:1]),
            validation_fraction=float(draw.choice([0.0, 0.2])),
            packing=packing,
            sequence_length=int(draw.choice([16, 24, 48])),
            short_sequence_length=12,
            short_steps=int(draw.choice([0, 0, 1, 2])),
            attend_across_documents=pairs or bool(draw.integers(2)),
            num_workers=0,
        ),
        objective=ObjectiveConfig(
            masking=str(draw.choice(["microsoft", "uniform"])),
            static_masks=int(draw.choice([0, 0, 2])),
        ),
        train=TrainConfig(
            global_batch_size=24,
            micro_batch_size=1,
            seed=int(draw.integers(1 << 30)),
            run_dir=str(run_dir),
        ),
    )
    validate_for_world(config, 1)
    return config


def rows_of(batches):
    """Every tensor of every row, as bytes, in order; rows without padding have a mask, too."""
    return [
        tuple(
            tensor[row].numpy().tobytes() if isinstance(tensor, torch.Tensor) else None
            for owner in (batch, replace(batch.inputs, attention_mask=batch.inputs.is_token))
            for tensor in (getattr(owner, item.name) for item in fields(owner))
        )
        for batch in batches
        for row in range(len(batch.sample_index))
    ]


def steps_of(config, vocabulary, rank, world, corpora, first=0):
    """Yield the micro batches of each step after the first ones, segment after segment."""
    while first < config.train.steps:
        part = segment_at(config, first)
        consumed = part.first_sample + 24 * (first - part.first_step)
        loader = train_loader(part.config, vocabulary, rank, world, consumed, corpora, part.stage)
        yield from itertools.islice(loader, part.end - first)
        first = part.end


def unbroken(config, vocabulary, corpora):
    """Rows of all steps, in batches as large as can be."""
    whole = replace(config, train=replace(config.train, micro_batch_size=24))
    steps = steps_of(whole, vocabulary, 0, 1, corpora)
    return [rows_of(step) for step in itertools.islice(steps, STEPS)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_cuts(packing, prefixes, vocabulary, tmp_path):
    draw = np.random.default_rng(PACKINGS.index(packing))
    crossed = 0
    for number in range(CUTS):
        config = random_config(draw, packing, prefixes, tmp_path)
        corpora = open_corpora(config, vocabulary, hashes=False)
        expected = unbroken(config, vocabulary, corpora)
        cut, world = int(draw.integers(0, STEPS)), int(draw.choice([1, 2, 3, 4, 6]))
        micro = int(draw.choice([size for size in (1, 2, 3, 4, 6) if 24 // world % size == 0]))
        workers = int(draw.integers(1, 3)) if number % WITH_WORKERS == 0 else 0
        layout = replace(
            config,
            data=replace(config.data, num_workers=workers),
            train=replace(config.train, micro_batch_size=micro),
        )
        found = [[] for _ in range(STEPS - cut)]
        for rank in range(world):
            steps = steps_of(layout, vocabulary, rank, world, corpora, cut)
            for step, batches in zip(found, steps, strict=False):
                step += rows_of(batches)
        assert found == expected[cut:], f"cut {number}: {layout}, step {cut}, {world} ranks"
        samples = [np.frombuffer(row[3], np.int64)[0] for step in expected for row in step]
        assert samples == list(range(24 * STEPS))
        part = segments(config)[-1]
        rows = training_rows(part.config, vocabulary, corpora, part.stage)
        rows = rows.source if isinstance(rows, ShiftedRows) else rows
        crossed += isinstance(rows, PackedRows) and rows.rows_per_epoch < 24 * STEPS
    assert crossed > CUTS / 10, "too few cuts cross an epoch"


def test_short_rows_come_first(prefixes, vocabulary, tmp_path):
    draw = np.random.default_rng(0)
    config = random_config(draw, "full_sentences", prefixes, tmp_path)
    config = replace(config, data=replace(config.data, short_steps=2, sequence_length=48))
    assert [part.first_sample for part in segments(config)] == [0, 48]
    corpora = open_corpora(config, vocabulary, hashes=False)
    steps = steps_of(config, vocabulary, 0, 1, corpora)
    lengths = [step[0].inputs.input_ids.size(1) for step in itertools.islice(steps, 5)]
    assert lengths == [12, 12, 48, 48, 48]
    # The long rows are the same sequence as without the short ones, only later.
    plain = replace(config, data=replace(config.data, short_steps=0))
    later = next(steps_of(config, vocabulary, 0, 1, corpora, 2))
    first = next(steps_of(plain, vocabulary, 0, 1, corpora))
    text = [torch.where(batch.labels >= 0, 0, 0).sum() for batch in later]
    assert len(text) == len(first)
    assert [batch.inputs.is_token.sum() for batch in later] == [
        batch.inputs.is_token.sum() for batch in first
    ]
    part = segments(config)[0]
    validation = validation_loader(part.phase_config, vocabulary, 0, 1, corpora)
    if validation is not None:
        assert next(iter(validation)).inputs.input_ids.size(1) == 48


@pytest.mark.parametrize("packing", PACKINGS)
def test_sample_log_of_every_format(packing, prefixes, vocabulary, tmp_path):
    draw = np.random.default_rng(8)
    config = random_config(draw, packing, prefixes, tmp_path)
    for rank in range(2):
        corpora = open_corpora(config, vocabulary, hashes=False)
        steps = steps_of(config, vocabulary, rank, 2, corpora)
        sample_log = SampleLog(tmp_path / "ledger", rank, 2, 0)
        for step, batches in enumerate(itertools.islice(steps, 4), start=1):
            sample_log.append(step, batches)
        sample_log.close()
    check_sample_log(tmp_path / "ledger", 24, 4)


@pytest.mark.parametrize("packing", PACKINGS)
def test_cached_indices_change_nothing(packing, prefixes, vocabulary, tmp_path, monkeypatch):
    draw = np.random.default_rng(9)
    config = random_config(draw, packing, prefixes, tmp_path)
    expected = unbroken(config, vocabulary, open_corpora(config, vocabulary, hashes=False))
    monkeypatch.setattr(index_cache, "WORTH_KEEPING", 1)
    for _ in range(2):
        corpora = open_corpora(config, vocabulary, hashes=False)
        assert unbroken(config, vocabulary, corpora) == expected
    assert len(list((tmp_path / "index").glob("*/index.json"))) > 1
