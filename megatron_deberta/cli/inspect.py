"""Show training samples with their masks, or statistics of shards.

`inspect data` prints training samples and statistics of their masks, separately for each sequence
length. `inspect shards` prints numbers of documents, sequences and tokens, the distribution of
document lengths (with --plot as a figure), the fill of rows in each packing, the most frequent
tokens, and beginnings of documents.

Examples:
  megatron-deberta inspect data RUN.yaml [section.key=value ...]
  megatron-deberta inspect data SHARD --sequence-length 128
  megatron-deberta inspect shards shards/*.idx --sequence-length 512 --plot lengths.png

In samples, {cat>[MASK]} is a masked token, {cat>dog} one replaced by a random token, and {cat=} one
that is predicted but unchanged. With --generator, a run of replaced-token detection, each sample is
followed by what its generator draws there: {cat>dog} is a replaced token, {cat=} one that is not.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_deberta.cli.arguments import refuse_options
from megatron_deberta.cli.inspect_shards import (
    SHARD_OPTIONS,
    add_shard_statistics_arguments,
    inspect_shards,
)
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.config.phases import segments
from megatron_deberta.data.build import (
    Corpora,
    form_targets,
    open_corpora,
    step_forms,
    tokenizer_path,
    training_rows,
)
from megatron_deberta.data.collate import StepForms, Targets
from megatron_deberta.data.dataset.index_cache import IndexCache
from megatron_deberta.data.dataset.rows import Row, RowBatch, RowSource
from megatron_deberta.data.masking import MaskedRows
from megatron_deberta.data.randomness import Purpose
from megatron_deberta.data.shards.format import is_shard
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import ConfigError
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from megatron_deberta.cli.inspect_generator import Generate

_NUM_PARTS = 8
_DATA_OPTIONS = {
    "first_sample": "--first-sample", "statistics": "--statistics", "generator": "--generator",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("what", choices=["data", "shards"], help="training samples, or shards")
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN.yaml|SHARD",
        help="data: run file or shards, then section.key=value overrides; shards: the shards",
    )
    parser.add_argument(
        "--prefix", action="append", default=[], metavar="SHARD", help="shard instead of a run"
    )
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR", help="tokenizer (default: the shards' own)"
    )
    parser.add_argument("--num-samples", type=int, default=3, help="samples printed (default 3)")
    parser.add_argument("--first-sample", type=int, help="data: index of the first sample")
    parser.add_argument("--statistics", type=int, help="data: samples averaged over (default 1000)")
    parser.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="tokens per row (default: data.sequence_length; shards: 512)",
    )
    parser.add_argument(
        "--generator",
        type=Path,
        metavar="RUN",
        help="data: run or checkpoint of replaced-token detection that draws pieces",
    )
    add_shard_statistics_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print samples and averages."""
    if args.num_samples < 0 or (args.first_sample or 0) < 0 or (args.statistics or 0) < 0:
        raise ConfigError("--num-samples, --first-sample and --statistics must not be negative")
    if args.what == "shards":
        refuse_options(args, _DATA_OPTIONS, "is for inspect data, not for shards")
        return inspect_shards(args)
    refuse_options(args, SHARD_OPTIONS, "is for inspect shards, not for data")
    args.first_sample = args.first_sample or 0
    args.statistics = 1000 if args.statistics is None else args.statistics
    while args.run and is_shard(args.run[0]):
        args.prefix.append(args.run.pop(0))
    config = _config(args)
    tokenizer = load_tokenizer(tokenizer_path(config))
    generate = None
    if args.generator:
        # Imported here because it imports torch.
        from megatron_deberta.cli.inspect_generator import open_generator
        from megatron_deberta.train.start import refusals

        with refusals():
            generate = open_generator(args.generator, tokenizer)
    vocabulary = Vocabulary.of(tokenizer)
    # Without a run, write no index files.
    cache = IndexCache(config.data.index_cache or "") if args.prefix else None
    corpora = open_corpora(config, vocabulary, config.data.verify_hashes, cache)
    parts = segments(config)
    sources = _row_sources(config, vocabulary, corpora, cache)
    statistics = [_Statistics(part.config.data.sequence_length) for part in parts]
    documents = sum(len(corpus) for corpus in corpora.train)
    tokens = sum(corpus.num_tokens for corpus in corpora.train)
    held_out = corpora.validation
    held_out_documents, held_out_tokens = (
        (len(held_out), held_out.num_tokens) if held_out else (0, 0)
    )
    print(
        f"training: {documents:,} documents, {tokens:,} tokens; validation: "
        f"{held_out_documents:,} documents, {held_out_tokens:,} tokens "
        f"({held_out_tokens / max(tokens + held_out_tokens, 1):.1%})"
    )
    for number in range(max(args.num_samples, args.statistics)):
        sample = np.array([args.first_sample + number])
        place = max(n for n, part in enumerate(parts) if part.first_sample <= sample[0])
        rows, choose = sources[place]
        batch = rows.rows(sample)
        mask_ids = sample if batch.mask_ids is None else batch.mask_ids
        targets, is_causal = choose(int(sample[0]))
        masked = targets(batch.tokens, batch.sizes, mask_ids)
        if number < args.num_samples:
            form = ", autoregressive" * is_causal
            print(_describe(int(sample[0]), batch.row(0), masked) + form)
            print(_marked_text(masked, batch.row(0), tokenizer, is_causal))
            if generate is not None:
                print(_generated_text(generate, int(sample[0]), masked, batch.row(0), tokenizer))
        if number < args.statistics:
            statistics[place].add(masked, batch, vocabulary, is_causal)
    for each in statistics:
        # Every row has a first token.
        if each.tokens_at[0]:
            print(f"\nover {each.tokens_at[0]} samples:")
            print(each.report())
        if each.autoregressive:
            print(f"\n{each.autoregressive} autoregressive samples")
    return 0


def _row_sources(
    config: RunConfig, vocabulary: Vocabulary, corpora: Corpora, cache: IndexCache | None
) -> list[tuple[RowSource, _Chooser]]:
    """Return the rows of each segment of a run, and how their targets are chosen."""
    sources = []
    for part in segments(config):
        if part.config.data.train != config.data.train:
            corpora = open_corpora(part.config, vocabulary, config.data.verify_hashes, cache)
        rows = training_rows(part.config, vocabulary, corpora, part.stage)
        length = part.config.data.sequence_length
        targets = form_targets(part.config, vocabulary, length, Purpose.TRAINING_MASK)
        forms = step_forms(part.config, part.first_sample)
        sources.append((rows, _Chooser(targets, forms)))
    return sources


class _Chooser(NamedTuple):
    """Choice of the targets of the rows of each form."""

    targets: list[Targets]
    forms: StepForms

    def __call__(self, sample: int) -> tuple[Targets, bool]:
        """Return what chooses a sample's targets, and whether it is autoregressive."""
        is_causal = self.forms.is_causal(sample)
        return self.targets[-1 if is_causal else 0], is_causal


def _describe(sample: int, row: Row, masked: MaskedRows) -> str:
    """Return a sample's headline."""
    size = row.tokens.size
    if row.is_random_next is None:
        number = len(row.document_starts)
        parts = f"{number} document{'s' if number > 1 else ''}"
    else:
        first = row.document_starts[1]
        parts = f"segments of {first} and {size - first}, " + (
            "the second from elsewhere (label 1)" if row.is_random_next else "in sequence (label 0)"
        )
    return (
        f"\nsample {sample}: {size} tokens, {parts}, {masked.positions.size} targets "
        f"({masked.positions.size / size:.1%})"
    )


def _config(args: argparse.Namespace) -> RunConfig:
    overrides = list(args.run)
    if args.sequence_length is not None:
        overrides.append(f"data.sequence_length={args.sequence_length}")
    if not args.prefix:
        if not overrides or "=" in overrides[0]:
            raise ConfigError("inspect data: give a run file or a shard")
        config = load_config(overrides[0], overrides[1:])
    else:
        config = load_config(None, overrides)
        # Of a shard everything is shown; a run's own split shows what it trains on.
        data = replace(config.data, train=tuple(args.prefix), validation=(), validation_fraction=0)
        config = replace(config, data=data)
    if args.tokenizer:
        config = replace(config, tokenizer=replace(config.tokenizer, path=args.tokenizer))
    return config


def _marked_text(masked: MaskedRows, row: Row, tokenizer: Tokenizer, is_causal: bool) -> str:
    """Return the text; each document, or segment of a pair, begins a line with its number."""
    originals = dict(zip(masked.positions.tolist(), masked.labels.tolist(), strict=True))
    if is_causal:
        originals = {}
    names = {start: number for number, start in enumerate(row.document_starts)}
    parts = []
    for position, token in enumerate(masked.tokens.tolist()):
        if position in names and len(names) > 1:
            letter = str(names[position]) if row.is_random_next is None else "AB"[names[position]]
            parts.append(f"{chr(10) if position else ''}  {letter}| ")
        original = originals.get(position)
        text = tokenizer.piece_text(token if original is None else original)
        if original is not None:
            space = " " * (text.startswith(" ") and text != " ")
            before, now = _without_space(text), _without_space(tokenizer.piece_text(token))
            text = f"{space}{{{before}=}}" if token == original else f"{space}{{{before}>{now}}}"
        parts.append(text)
    return "".join(parts)


def _generated_text(
    generate: Generate, sample: int, masked: MaskedRows, row: Row, tokenizer: Tokenizer
) -> str:
    """Return the text with the pieces that the generator draws."""
    drawn = generate(masked.tokens, masked.positions, sample)
    filled = masked.tokens.copy()
    filled[masked.positions] = drawn
    text = _marked_text(replace(masked, tokens=filled), row, tokenizer, is_causal=False)
    return f"generated, {(drawn != masked.labels).sum()} of {drawn.size} replaced:\n{text}"


def _without_space(text: str) -> str:
    """Return a piece without the space before a word; a space alone as an open box."""
    return text.lstrip(" ") or "\u2423"


@dataclass
class _Statistics:
    """Sums over samples.

    Attributes:
        length: N.
        targets_at: [N] targets at each position.
        tokens_at: [N] rows with a token there.
        fates: what stands at the targets.
        spans: runs of adjacent targets, by length in pieces.
        parts: documents, or segments of pairs.
        labels: labels of pairs.
        autoregressive: number of autoregressive rows, which count nowhere else.
    """

    length: int
    targets_at: np.ndarray[tuple[int], np.dtype[np.int64]] = field(init=False)
    tokens_at: np.ndarray[tuple[int], np.dtype[np.int64]] = field(init=False)
    fates: Counter[str] = field(default_factory=Counter)
    spans: Counter[int] = field(default_factory=Counter)
    parts: int = 0
    labels: Counter[int] = field(default_factory=Counter)
    autoregressive: int = 0

    def __post_init__(self) -> None:
        self.targets_at = np.zeros(self.length, np.int64)
        self.tokens_at = np.zeros(self.length, np.int64)

    def add(
        self, masked: MaskedRows, batch: RowBatch, vocabulary: Vocabulary, is_causal: bool
    ) -> None:
        """Count a row."""
        if is_causal:
            self.autoregressive += 1
            return
        self.parts += int(batch.part_counts[0])
        if batch.is_random_next is not None:
            self.labels.update(batch.is_random_next.tolist())
        self.tokens_at[: masked.tokens.size] += 1
        self.targets_at[masked.positions] += 1
        now = masked.tokens[masked.positions]
        self.fates["[MASK]"] += int((now == vocabulary.mask_id).sum())
        self.fates["kept"] += int((now == masked.labels).sum())
        self.fates["random"] += int(((now != vocabulary.mask_id) & (now != masked.labels)).sum())
        breaks = np.flatnonzero(np.diff(masked.positions) > 1) + 1
        if masked.positions.size:
            self.spans.update(span.size for span in np.split(masked.positions, breaks))

    def report(self) -> str:
        """Return the averages as lines."""
        rows = max(int(self.tokens_at[0]), 1)
        targets = max(int(self.targets_at.sum()), 1)
        parts = zip(
            np.array_split(self.targets_at, _NUM_PARTS),
            np.array_split(self.tokens_at, _NUM_PARTS),
            strict=True,
        )
        share = targets / max(int(self.tokens_at.sum()), 1)
        rates = [f"{hits.sum() / max(int(tokens.sum()), 1):.1%}" for hits, tokens in parts]
        spans = sum(self.spans.values()) or 1
        longest = sorted(self.spans)[:6]
        pairs = []
        if self.labels:
            pairs = [f"  in sequence         {self.labels[0] / rows:.1%} of pairs"]
        return "\n".join(
            [
                f"  tokens a row        {self.tokens_at.sum() / rows:.1f} of {self.length}",
                f"  parts a row         {self.parts / rows:.2f}",
                *pairs,
                f"  targets             {share:.2%} of tokens",
                f"  by eighth of a row  {'  '.join(rates)}",
                "  what stands there   "
                + "  ".join(f"{name} {count / targets:.1%}" for name, count in self.fates.items()),
                "  pieces in a run     "
                + "  ".join(f"{size}: {self.spans[size] / spans:.1%}" for size in longest),
            ]
        )
