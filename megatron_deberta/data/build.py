"""Construction of corpora, loaders and indices from a run configuration."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from megatron_deberta.config.phases import FIRST_STAGE, Segment, Stage, segments
from megatron_deberta.config.rules import causal_fraction, decoder_masking
from megatron_deberta.config.schema import DataConfig, RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.collate import (
    BatchBuilder,
    Builder,
    NextTokens,
    StepForms,
    Targets,
    TwoFormBuilder,
)
from megatron_deberta.data.dataset.blend import BlendedRows
from megatron_deberta.data.dataset.corpus import Corpus, open_shard, split_validation
from megatron_deberta.data.dataset.index_cache import WORTH_KEEPING, IndexCache
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.dataset.rows import RowSource, ShiftedRows
from megatron_deberta.data.loader import StepSampler, TrainLoader, ValidationLoader
from megatron_deberta.data.masking import Masker
from megatron_deberta.data.randomness import Purpose, mix64
from megatron_deberta.data.shards.format import blend_weight, refuse_duplicates, shard_prefixes
from megatron_deberta.data.shards.manifest import read_manifest
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import ConfigError

# Memory per token while a micro batch is built: ids before and after masking, mask, positions.
_BYTES_PER_TOKEN = 48


@dataclass(frozen=True, slots=True)
class Corpora:
    """Documents of a run.

    Attributes:
        train: one corpus, or one per component of a blend.
        weights: share of samples of each of ``train``.
        validation: held-out documents, or None.
        cache: indices of the corpora.
    """

    train: tuple[Corpus, ...]
    weights: tuple[float, ...]
    validation: Corpus | None
    cache: IndexCache


def parse_prefixes(values: tuple[str, ...], key: str) -> tuple[list[list[str]], list[float]]:
    """Parse ``shard shard ...`` (one corpus) or ``weight shard weight shard ...`` (a blend).

    Args:
        values: ``data.train`` or ``data.validation``, shards named as for ``shard_prefixes``.
        key: its name, for error messages.

    Returns:
        Prefixes and weight of each component.

    Raises:
        ConfigError: ``values`` is empty, weights and shards do not alternate, or a folder holds
            no shards.
    """
    if not values:
        raise ConfigError(f"{key} is empty; give shard prefixes, as preprocess printed them")
    numbers = [blend_weight(value) for value in values]
    if all(number is None for number in numbers):
        return [shard_prefixes(values, each_once=False)], [1.0]
    weights, rest = numbers[::2], numbers[1::2]
    if len(values) % 2 or None in weights or any(number is not None for number in rest):
        raise ConfigError(
            f"{key} is {list(values)}; give prefixes only, or a weight before every prefix"
        )
    parts = [shard_prefixes([name]) for name in values[1::2]]
    return parts, [float(weight) for weight in values[::2]]


def validation_prefixes(data: DataConfig) -> list[str]:
    """Return the prefixes of the shards of ``data.validation``."""
    return shard_prefixes(data.validation, each_once=False) if data.validation else []


def tokenizer_path(config: RunConfig) -> str:
    """Return ``tokenizer.path``, or else the path in the first training shard's manifest.

    Raises:
        ConfigError: neither is known, or ``data.train`` is malformed.
        DataError: the shard is missing, or the manifest is damaged.
    """
    if config.tokenizer.path:
        return config.tokenizer.path
    components, _ = parse_prefixes(config.data.train, "data.train")
    manifest = read_manifest(components[0][0])
    if manifest is None:
        # Of a shard that does not exist, say so.
        IndexedDataset(components[0][0])
        raise ConfigError(
            f"tokenizer.path is empty and {components[0][0]}.manifest.json is missing; set "
            "tokenizer.path"
        )
    return manifest.tokenizer_path


def open_corpora(
    config: RunConfig, vocabulary: Vocabulary, hashes: bool, cache: IndexCache | None = None
) -> Corpora:
    """Open all shards of a run and split off validation.

    Args:
        config: the run; ``data`` and ``train.seed`` are used.
        vocabulary: of the run's tokenizer.
        hashes: read every shard and compare its SHA-256 with the manifest.
        cache: of indices; None: the run's.

    Raises:
        ConfigError: prefixes or weights are malformed.
        DataError: a shard is missing, damaged, of another tokenizer, or too small to split.
    """
    data = config.data
    components, weights = parse_prefixes(data.train, "data.train")
    held_out_shards = validation_prefixes(data)
    # Documents of a shard listed twice could be on both sides of a split.
    refuse_duplicates(
        [*itertools.chain(*components), *held_out_shards],
        "data.train and data.validation: ",
        "remove one, or raise its weight",
    )
    shards = [[open_shard(prefix, vocabulary, hashes) for prefix in part] for part in components]
    if cache is None:
        cache = IndexCache(data.index_cache or Path(config.train.run_dir) / "index")
    validation: Corpus | None = None
    if data.validation_fraction and not data.validation:
        fraction, seed = data.validation_fraction, config.train.seed
        splits = [split_validation(part, fraction, seed, cache) for part in shards]
        train, held_out = zip(*splits, strict=True)
        validation = _concatenate(held_out, cache)
    else:
        train = tuple(Corpus(part, cache=cache) for part in shards)
        if data.validation:
            opened = [open_shard(prefix, vocabulary, hashes) for prefix in held_out_shards]
            validation = Corpus(opened, cache=cache)
    return Corpora(train, tuple(weights), validation, cache)


def build_loaders(
    config: RunConfig,
    vocabulary: Vocabulary,
    dp_rank: int,
    dp_size: int,
    consumed_samples: int,
    corpora: Corpora | None = None,
) -> tuple[TrainLoader[Batch], ValidationLoader[Batch] | None]:
    """Build `train_loader` and `validation_loader` of a run without phases.

    Args:
        config: the run.
        vocabulary: of the run's tokenizer.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        consumed_samples: global samples of completed steps.
        corpora: from ``open_corpora``; None: open them.
    """
    if corpora is None:
        corpora = open_corpora(config, vocabulary, config.data.verify_hashes and dp_rank == 0)
    return (
        train_loader(config, vocabulary, dp_rank, dp_size, consumed_samples, corpora, FIRST_STAGE),
        validation_loader(config, vocabulary, dp_rank, dp_size, corpora),
    )


def train_loader(
    config: RunConfig,
    vocabulary: Vocabulary,
    dp_rank: int,
    dp_size: int,
    consumed_samples: int,
    corpora: Corpora,
    stage: Stage,
) -> TrainLoader[Batch]:
    """Build the training loader of a data-parallel rank; its tensor-parallel ranks have the same.

    Args:
        config: the run, or a segment of it.
        vocabulary: of the run's tokenizer.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        consumed_samples: global samples of completed steps.
        corpora: from ``open_corpora``.
        stage: sequence of rows to train on, of a run with phases.

    Raises:
        ConfigError: sizes do not divide, a micro batch exceeds this machine's memory, or prefixes
            or weights are malformed.
        DataError: see ``open_corpora``.
    """
    _check_memory(config)
    sampler = StepSampler(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )
    rows = training_rows(config, vocabulary, corpora, stage)
    builder, *others = _builders(config, vocabulary, rows, Purpose.TRAINING_MASK)
    if others:
        builder = TwoFormBuilder(builder, others[0], step_forms(config, consumed_samples))
    return TrainLoader(
        builder,
        sampler,
        consumed_samples,
        num_workers=config.data.num_workers,
        pin_memory=torch.cuda.is_available() and config.train.device != "cpu",
    )


def validation_loader(
    config: RunConfig, vocabulary: Vocabulary, dp_rank: int, dp_size: int, corpora: Corpora
) -> ValidationLoader[Batch] | None:
    """Build the validation loader of one data-parallel rank.

    Args:
        config: the run.
        vocabulary: of the run's tokenizer.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        corpora: from ``open_corpora``.

    Returns:
        The loader; None where the run has no validation documents.
    """
    rows = validation_rows(config, vocabulary, corpora)
    if rows is None:
        return None
    builder, *others = _builders(config, vocabulary, rows, Purpose.VALIDATION_MASK)
    return ValidationLoader(
        builder,
        min(config.train.eval_batches * config.train.global_batch_size, rows.rows_per_epoch),
        config.train.micro_batch_size,
        dp_rank,
        dp_size,
        tuple(others),
    )


def validation_rows(
    config: RunConfig, vocabulary: Vocabulary, corpora: Corpora
) -> PackedRows | None:
    """Return the unmasked validation rows; None where the run has no validation documents.

    Args:
        config: the run.
        vocabulary: of the run's tokenizer.
        corpora: from ``open_corpora``.
    """
    if corpora.validation is None:
        return None
    data = config.data
    return PackedRows(
        corpora.validation,
        vocabulary,
        data.sequence_length,
        data.packing,
        mix64(config.train.seed, 0),
        cache=corpora.cache,
    )


def training_rows(
    config: RunConfig, vocabulary: Vocabulary, corpora: Corpora, stage: Stage = FIRST_STAGE
) -> RowSource:
    """Return the unmasked training rows of a segment, by global sample index.

    Args:
        config: the segment.
        vocabulary: of the run's tokenizer.
        corpora: from ``open_corpora``.
        stage: sequence of rows of the segment; the first one is that of a run without phases.
    """
    key: tuple[int, ...] = (Purpose.PHASE_ROWS, stage.number) if stage.number else ()
    if stage.is_short:
        key = (Purpose.SHORT_ROWS,)
    sources = [
        PackedRows(
            corpus,
            vocabulary,
            config.data.sequence_length,
            config.data.packing,
            mix64(config.train.seed, component, *key),
            config.objective.static_masks or 0,
            corpora.cache,
        )
        for component, corpus in enumerate(corpora.train)
    ]
    rows = sources[0] if len(sources) == 1 else BlendedRows(sources, corpora.weights)
    return ShiftedRows(rows, stage.first_sample) if stage.first_sample else rows


def _check_memory(config: RunConfig) -> None:
    """Raise if building a micro batch takes more memory than this machine has."""
    rows, length = config.train.micro_batch_size, config.data.sequence_length
    needed, total = rows * length * _BYTES_PER_TOKEN, psutil.virtual_memory().total
    if needed > total:
        raise ConfigError(
            f"train.micro_batch_size={rows}: building a micro batch of {rows:,} x {length} tokens "
            f"takes about {needed / 2**30:,.0f} GiB of memory, this machine has "
            f"{total / 2**30:,.0f}; lower it"
        )


def _builders(
    config: RunConfig, vocabulary: Vocabulary, rows: RowSource, purpose: Purpose
) -> list[Builder[Batch]]:
    """Return a builder of each form of the objective's batches, masked before autoregressive."""
    length = config.data.sequence_length
    return [
        BatchBuilder(
            rows,
            targets,
            vocabulary,
            length,
            config.data.attend_across_documents,
            isinstance(targets, NextTokens),
            decoder_masker(config, vocabulary, length, purpose),
        )
        for targets in form_targets(config, vocabulary, length, purpose)
    ]


def step_forms(config: RunConfig, first_sample: int) -> StepForms:
    """Return the form of each step's batch.

    Args:
        config: the run, or a segment of it.
        first_sample: first sample of any step.
    """
    return StepForms(
        fraction=causal_fraction(config.objective),
        seed=config.train.seed,
        first_sample=first_sample,
        global_batch_size=config.train.global_batch_size,
    )


def form_targets(
    config: RunConfig, vocabulary: Vocabulary, length: int, purpose: Purpose
) -> list[Targets]:
    """Return what chooses the tokens to predict, for each form of the objective's batches.

    Args:
        config: the run.
        vocabulary: of the run's tokenizer.
        length: maximum tokens per row.
        purpose: training or validation masks.
    """
    fraction = causal_fraction(config.objective)
    found: list[Targets] = []
    if fraction < 1:
        found.append(Masker(config.objective, vocabulary, length, config.train.seed, purpose))
    if fraction > 0:
        found.append(NextTokens(vocabulary, length, not config.data.attend_across_documents))
    return found


def decoder_masker(
    config: RunConfig, vocabulary: Vocabulary, length: int, purpose: Purpose
) -> Masker | None:
    """Return what masks rows for a decoder beside the encoder; None: the objective has none.

    Arguments as in ``form_targets``. The masks do not depend on the encoder's.
    """
    objective = decoder_masking(config.objective)
    if objective is None:
        return None
    seed = mix64(config.train.seed, Purpose.DECODER_MASK)
    return Masker(objective, vocabulary, length, seed, purpose)


def _concatenate(corpora: tuple[Corpus, ...], cache: IndexCache) -> Corpus:
    """Concatenate split corpora."""
    shards = [shard for corpus in corpora for shard in corpus.shards]
    splits = [split for corpus in corpora for split in corpus.splits or ()]
    return Corpus(shards, splits, cache)


class Index(NamedTuple):
    """Index of one epoch of packed rows.

    Attributes:
        rows: the rows.
        epoch: epoch of ``rows``.
    """

    rows: PackedRows
    epoch: int

    @property
    def is_kept(self) -> bool:
        """Whether the index is large enough to be kept on disk."""
        return self.rows.index_entries >= WORTH_KEEPING


def list_indices(config: RunConfig, vocabulary: Vocabulary) -> list[Index]:
    """List the indices that a run reads, each once, in the order in which it does.

    Opens the shards and, by that, builds the indices that do not depend on the epoch.

    Args:
        config: the run.
        vocabulary: of its tokenizer.

    Raises:
        ConfigError: ``data.train`` or ``data.validation`` is malformed.
        DataError: a shard or an index is damaged, or the index cannot be written.
    """
    opened: dict[tuple[tuple[str, ...], tuple[str, ...]], Corpora] = {}
    found: dict[tuple[str, int], Index] = {}
    for part in segments(config):
        data = part.config.data
        corpora = opened.get((data.train, data.validation))
        if corpora is None:
            corpora = open_corpora(part.config, vocabulary, hashes=False)
            opened[data.train, data.validation] = corpora
        for index in _of_segment(part, vocabulary, corpora):
            found.setdefault((index.rows.identity, index.epoch), index)
    return list(found.values())


def build_index(config: RunConfig, vocabulary: Vocabulary, number: int) -> int:
    """Build one of the indices of a run, unless it is there.

    Args:
        config: the run.
        vocabulary: of its tokenizer.
        number: place of the index in ``list_indices``.

    Returns:
        ``number``.
    """
    index = _opened(config, vocabulary)[number]
    index.rows.build_index(index.epoch)
    return number


# A worker opens the shards once, not for every index.
_opened = functools.lru_cache(maxsize=1)(list_indices)


def _of_segment(part: Segment, vocabulary: Vocabulary, corpora: Corpora) -> Iterator[Index]:
    validation = validation_rows(part.config, vocabulary, corpora)
    if validation is not None:
        yield from _of_rows(validation, 0, 1)
    end = part.first_sample + part.steps * part.config.train.global_batch_size
    rows = training_rows(part.config, vocabulary, corpora, part.stage)
    yield from _of_rows(rows, part.first_sample, end)


def _of_rows(rows: RowSource, begin: int, end: int) -> Iterator[Index]:
    """Yield the indices of the rows ``begin`` to ``end``."""
    if begin >= end:
        return
    if isinstance(rows, ShiftedRows):
        yield from _of_rows(rows.source, begin - rows.first, end - rows.first)
    elif isinstance(rows, BlendedRows):
        for source, first, last in rows.parts(begin, end):
            yield from _of_rows(source, first, last)
    else:
        assert isinstance(rows, PackedRows)
        epochs = range(begin // rows.rows_per_epoch, (end - 1) // rows.rows_per_epoch + 1)
        for epoch in {rows.index_epoch(epoch): None for epoch in epochs}:
            yield Index(rows, epoch)
