"""Data of a run as the trainer uses it, and the data of pretraining runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from megatron_deberta.checkpoint.resume import Identity
from megatron_deberta.config.phases import Stage, describe_phases, segments
from megatron_deberta.config.rules import batch_arithmetic
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.build import (
    Corpora,
    open_corpora,
    tokenizer_path,
    train_loader,
    validation_loader,
)
from megatron_deberta.data.loader import TrainLoader
from megatron_deberta.data.shards.statistics import PACKINGS
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.validation import Evaluation, evaluate
from megatron_deberta.model.flops import recomputed_flops
from megatron_deberta.objectives import build_objective
from megatron_deberta.observe.throughput import StepWork
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from megatron_deberta.train.fingerprint import run_fingerprint
from megatron_deberta.train.records import RunRecords

logger = logging.getLogger(__name__)

# Masking probability of the release, above which its generator spends its budget early in a row
_MICROSOFT_RATE = 0.15
# Factor by which the validation's share of the tokens may miss its share of the documents.
_FAR_SHARE = 1.5
# ``data.train`` and ``data.validation``
_DataKey = tuple[tuple[str, ...], tuple[str, ...]]


class Validator(Protocol):
    """Validates a model."""

    def __call__(self, module: nn.Module, *, should_abort: Callable[[], bool]) -> Evaluation | None:
        """Return the metrics; None if told to stop meanwhile. Collective over all ranks."""


class RunData(Protocol):
    """Training and validation data of a run."""

    @property
    def identity(self) -> Identity:
        """Identity of tokenizer and training data."""

    def train_loader(
        self, config: RunConfig, groups: ProcessGroups, consumed_samples: int, stage: Stage
    ) -> TrainLoader[Any]:
        """Build this rank's training loader.

        Args:
            config: the run, or a segment of it.
            groups: the rank grid.
            consumed_samples: global samples of completed steps.
            stage: sequence of rows that the segment reads.
        """

    def validator(self, config: RunConfig, groups: ProcessGroups) -> Validator | None:
        """Build the validation of a run, or of one of its phases; None: it has none."""

    def prepare_records(self, records: RunRecords) -> None:
        """Record what is known of the data, such as a baseline; rank 0 only."""

    def step_work(self, config: RunConfig) -> StepWork:
        """Return the work of a step of a segment."""

    def describe(self, config: RunConfig, dp_size: int) -> list[tuple[str, str]]:
        """Return labels and text about batches and amount of training."""


# Opens the data of a run; values of the config that depend on the data are filled in.
OpenData = Callable[[RunConfig, ProcessGroups], tuple[RunConfig, RunData]]


@dataclass(frozen=True, slots=True)
class PretrainingData:
    """Vocabulary, documents and their identity.

    Attributes:
        vocabulary: of the run's tokenizer.
        corpora: documents by ``data.train`` and ``data.validation``, which phases may change.
        identity: of tokenizer and training data.
    """

    vocabulary: Vocabulary
    corpora: Mapping[_DataKey, Corpora]
    identity: Identity

    def train_loader(
        self, config: RunConfig, groups: ProcessGroups, consumed_samples: int, stage: Stage
    ) -> TrainLoader[Any]:
        """Build this rank's training loader; arguments as in `RunData`."""
        return train_loader(
            config,
            self.vocabulary,
            groups.dp_rank,
            groups.dp_size,
            consumed_samples,
            self.corpora[_data_key(config)],
            stage,
        )

    def validator(self, config: RunConfig, groups: ProcessGroups) -> Validator | None:
        """Build the validation, if there are documents for it."""
        corpora = self.corpora[_data_key(config)]
        batches = validation_loader(
            config, self.vocabulary, groups.dp_rank, groups.dp_size, corpora
        )
        if batches is None:
            return None
        return functools.partial(
            evaluate, batches=batches, groups=groups, objective=build_objective(config)
        )

    def prepare_records(self, records: RunRecords) -> None:
        """Record the unigram baseline."""
        records.measure_unigram(self.vocabulary, self.corpora[_data_key(records.config)])

    def step_work(self, config: RunConfig) -> StepWork:
        """Return the work of a step of a segment."""
        return rows_work(config, config.data.sequence_length)

    def describe(self, config: RunConfig, dp_size: int) -> list[tuple[str, str]]:
        """Return tokens per step, and the number of tokens and epochs."""
        parts = segments(config)
        batches, training = describe_tokens(
            parts[-1].config, dp_size, self.corpora[_data_key(parts[-1].config)]
        )
        rows = [("packing", line) for line in self._packing(config)]
        if len(parts) == 1:
            return [batches, *rows, training]
        tokens = sum(part.tokens for part in parts)
        return [
            *(("phases", line) for line in describe_phases(config)),
            *rows,
            ("training", f"{config.train.steps:,} steps = {tokens:,} tokens"),
        ]

    def _packing(self, config: RunConfig) -> list[str]:
        """Describe how full the rows of each format and length are."""
        lines = {}
        for part in segments(config):
            data = part.config.data
            count = PACKINGS.get(data.packing)
            name = f"{data.packing}, rows of {data.sequence_length:,}"
            if count is None or name in lines:
                continue
            corpora = self.corpora[_data_key(part.config)]
            packings = [count(corpus.lengths, data.sequence_length) for corpus in corpora.train]
            filled = sum(
                weight * packing.filled
                for weight, packing in zip(corpora.weights, packings, strict=True)
            ) / sum(corpora.weights)
            number = sum(packing.rows for packing in packings)
            lines[name] = f"{name}: {number:,} per epoch, {filled:.2%} filled"
        return list(lines.values())


def open_vocabulary(config: RunConfig) -> tuple[str, Tokenizer, Vocabulary]:
    """Return the tokenizer's path, the tokenizer and its vocabulary.

    Raises:
        ConfigError: the tokenizer has more tokens than ``model.vocab_size``.
        DataError: the tokenizer is missing or damaged.
    """
    path = tokenizer_path(config)
    tokenizer = load_tokenizer(path)
    vocabulary = Vocabulary.of(tokenizer)
    if vocabulary.size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {vocabulary.size} ids "
            f"of tokenizer.path={path}; set model.vocab_size={vocabulary.size}"
        )
    return path, tokenizer, vocabulary


def open_pretraining_data(
    config: RunConfig, groups: ProcessGroups
) -> tuple[RunConfig, PretrainingData]:
    """Open the tokenizer and the shards.

    Raises:
        ConfigError: the tokenizer has more tokens than ``model.vocab_size``.
        DataError: a shard is damaged or was made with another tokenizer.
    """
    path, tokenizer, vocabulary = open_vocabulary(config)
    config = build_objective(config).complete_config(vocabulary.special_ids)
    hashes = config.data.verify_hashes and groups.rank == 0
    configs = {_data_key(part.config): part.config for part in segments(config)}
    corpora = {key: open_corpora(part, vocabulary, hashes) for key, part in configs.items()}
    if groups.rank == 0:
        _warn_of_masking(config)
        for (_, validation), part in corpora.items():
            if not validation:
                _warn_of_shares(part, config.data.validation_fraction)
    identity = Identity(
        tokenizer_path=str(Path(path).resolve()),
        tokenizer_fingerprint=tokenizer.fingerprint,
        data_fingerprint=run_fingerprint([part.data for part in configs.values()]),
    )
    return config, PretrainingData(vocabulary, corpora, identity)


def _warn_of_masking(config: RunConfig) -> None:
    """Warn where Microsoft's masking leaves the end of rows almost unmasked."""
    for part in segments(config):
        objective = part.config.objective
        if objective.masking == "microsoft" and objective.mask_probability > _MICROSOFT_RATE:
            logger.warning(
                "objective.masking=microsoft with objective.mask_probability=%g: the end of a row "
                "is masked far less than its beginning; use objective.masking=uniform (rates by "
                "eighth of a row: megatron-deberta inspect data)",
                objective.mask_probability,
            )
            return


def _warn_of_shares(corpora: Corpora, fraction: float) -> None:
    """Warn where documents of unequal length make the validation far larger or smaller."""
    validation = corpora.validation
    if validation is None:
        return
    tokens = sum(corpus.num_tokens for corpus in corpora.train)
    share = validation.num_tokens / max(tokens + validation.num_tokens, 1)
    if not fraction / _FAR_SHARE <= share <= fraction * _FAR_SHARE:
        logger.warning(
            "data.validation_fraction=%g holds out %d of %d documents, which are %.1f %% of the "
            "tokens; name validation shards in data.validation, or cut long documents",
            fraction,
            len(validation),
            len(validation) + sum(map(len, corpora.train)),
            100 * share,
        )


def _data_key(config: RunConfig) -> _DataKey:
    return config.data.train, config.data.validation


def rows_work(config: RunConfig, length: float) -> StepWork:
    """Return the work of a step whose rows have ``length`` tokens."""
    model, train = config.model, config.train
    micro = train.micro_batch_size
    return StepWork(
        int(train.global_batch_size * length),
        build_objective(config).training_flops(length, micro),
        recomputed_flops(model, int(length), micro, config.parallel.recompute),
    )


def describe_tokens(config: RunConfig, dp_size: int, corpora: Corpora) -> list[tuple[str, str]]:
    """Describe the batches, and the amount of training in tokens and epochs.

    Args:
        config: the run.
        dp_size: number of data-parallel ranks.
        corpora: its documents.

    Returns:
        Labels and texts.
    """
    train, batch = config.train, batch_arithmetic(config, dp_size)
    tokens = train.steps * batch.tokens_per_step
    epochs = tokens / sum(int(corpus.lengths.sum()) for corpus in corpora.train)
    return [
        (
            "batch",
            f"{train.global_batch_size:,} sequences of {config.data.sequence_length:,} = "
            f"{batch.tokens_per_step:,} tokens per step ({batch.micro_batch_size} per micro batch "
            f"x {batch.accumulation_steps} accumulated x {batch.dp_size} data-parallel)",
        ),
        ("training", f"{train.steps:,} steps = {tokens:,} tokens = {epochs:.3g} epochs"),
    ]
