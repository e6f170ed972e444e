"""Show training samples with their masks, or statistics of shards.

Examples:
  megatron-deberta inspect data RUN.yaml
  megatron-deberta inspect shards shards/*.idx --plot lengths.png
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_deberta.cli.arguments import Subcommand, add_shared, number, shard_names
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.config.phases import segments
from megatron_deberta.data import Integers
from megatron_deberta.data.dataset.index_cache import IndexCache
from megatron_deberta.data.dataset.rows import Row, RowBatch, RowSource
from megatron_deberta.data.masking import MaskedRows
from megatron_deberta.data.randomness import Purpose
from megatron_deberta.data.shards.format import is_shard
from megatron_deberta.data.shards.manifest import read_manifest
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.shards.statistics import (
    PACKINGS,
    QUANTILES,
    Packing,
    ShardStatistics,
    count_shards,
    document_lengths,
)
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import ConfigError, DataError, refusals
from megatron_deberta.files import temporary_name
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    # These import torch, which --help does not need.
    from megatron_deberta.data.build import Corpora
    from megatron_deberta.data.collate import StepForms, Targets

Generate = Callable[[Integers, Integers, int], Integers]
"""Function of masked tokens ``[N]``, positions ``[M]`` and the sample's index: drawn ``[M]``."""

_DATA_TEXT = """Show training samples with their masks, and statistics of the masks.

In samples, {cat>[MASK]} is a masked token, {cat>dog} one replaced by a random token, and {cat=} one
that is predicted but unchanged. With --generator, a run of replaced-token detection, each sample is
followed by what its generator draws there: {cat>dog} is a replaced token, {cat=} one that is not.
The statistics are separate for each sequence length.

Examples:
  megatron-deberta inspect data RUN.yaml [section.key=value ...]
  megatron-deberta inspect data SHARD --sequence-length 128
  megatron-deberta inspect data RUN.yaml --generator runs/rtd --num-samples 10 --statistics 0
"""
_SHARDS_TEXT = """Show statistics of shards.

Numbers of documents, sequences and tokens, the distribution of document lengths (with --plot as a
figure), the fill of rows in each packing, the most frequent tokens, and beginnings of documents.

Examples:
  megatron-deberta inspect shards shards/*.idx
  megatron-deberta inspect shards shards --sequence-length 512 --plot lengths.png
"""
_NUM_BINS = 8
"""Bins of positions in a row, whose shares of targets are shown."""
_BAR = 40
"""Characters of the longest bar of a histogram."""
_SAMPLE_TOKENS = 60
"""Tokens shown of a document."""
_MOST_TOKENS = 200_000_000
"""Tokens whose frequencies are counted."""


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``inspect data``."""
    parser.add_argument(
        "run", nargs="*", metavar="RUN.yaml|SHARD",
        help="run file or shards, then section.key=value overrides",
    )  # fmt: skip
    add_shared(parser, "--prefix", help="shard instead of a run")
    add_shared(parser, "--tokenizer", help="tokenizer (default: the shards' own)")
    add_shared(parser, "--num-samples", help="samples printed")
    parser.add_argument(
        "--first-sample", type=number(int, 0), default=0, metavar="N",
        help="index of the first sample",
    )  # fmt: skip
    parser.add_argument(
        "--statistics", type=number(int, 0), default=1000, metavar="N",
        help="samples averaged over",
    )  # fmt: skip
    add_shared(parser, "--sequence-length", help="tokens per row (default: data.sequence_length)")
    parser.add_argument(
        "--generator", default="", metavar="DIR",
        help="run or checkpoint of replaced-token detection that draws pieces",
    )  # fmt: skip


def _add_shards_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``inspect shards``."""
    add_shared(parser, "shards", "--prefix")
    add_shared(parser, "--tokenizer", help="tokenizer (default: the shards' own)")
    add_shared(parser, "--num-samples", help="documents of which the beginning is printed")
    add_shared(parser, "--sequence-length", type=number(int, 3), default=512, help="tokens per row")
    parser.add_argument(
        "--top", type=number(int, 0), default=20, metavar="N", help="most frequent pieces"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the document lengths")


def _inspect_data(args: argparse.Namespace) -> None:
    """Print samples and averages over samples."""
    from megatron_deberta.data.build import open_corpora, tokenizer_path

    first, num_averaged = args.first_sample, args.statistics
    while args.run and is_shard(args.run[0]):
        args.prefix.append(args.run.pop(0))
    config = _config(args)
    tokenizer = load_tokenizer(tokenizer_path(config))
    generate = _open_generator(Path(args.generator), tokenizer) if args.generator else None
    vocabulary = Vocabulary.of(tokenizer)
    # Without a run, write no index files.
    cache = IndexCache(config.data.index_cache or "") if args.prefix else None
    corpora = open_corpora(config, vocabulary, config.data.verify_hashes, cache)
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
    segment_samples = _segment_samples(config, vocabulary, corpora, cache)
    for sample in range(first, first + max(args.num_samples, num_averaged)):
        part = [each for each in segment_samples if each.first <= sample][-1]
        batch = part.rows.rows(np.array([sample]))
        masked, is_causal = part.choose(sample, batch)
        if sample < first + args.num_samples:
            form = ", autoregressive" * is_causal
            print(_describe(sample, batch.row(0), masked) + form)
            print(_marked_text(masked, batch.row(0), tokenizer, is_causal))
            if generate is not None:
                print(_generated_text(generate, sample, masked, batch.row(0), tokenizer))
        if sample < first + num_averaged:
            part.statistics.add(masked, batch, vocabulary, is_causal)
    for part in segment_samples:
        found = part.statistics
        # Every row has a first token.
        if found.tokens_at[0]:
            print(f"\nover {found.tokens_at[0]} samples:")
            print(found.report())
        if found.autoregressive:
            print(f"\n{found.autoregressive} autoregressive samples")


class _SegmentSamples(NamedTuple):
    """Rows of a segment, the choice of their targets, and sums over them."""

    first: int
    rows: RowSource
    targets: list[Targets]
    forms: StepForms
    statistics: _Statistics

    def choose(self, sample: int, batch: RowBatch) -> tuple[MaskedRows, bool]:
        """Return a sample with its targets, and whether it is autoregressive."""
        is_causal = self.forms.is_causal(sample)
        mask_ids = np.array([sample]) if batch.mask_ids is None else batch.mask_ids
        targets = self.targets[-1 if is_causal else 0]
        return targets(batch.tokens, batch.sizes, mask_ids), is_causal


def _segment_samples(
    config: RunConfig, vocabulary: Vocabulary, corpora: Corpora, cache: IndexCache | None
) -> list[_SegmentSamples]:
    """Return the rows of each segment of a run, in order."""
    from megatron_deberta.data.build import (
        form_targets,
        open_corpora,
        step_forms,
        training_rows,
    )

    found = []
    for segment in segments(config):
        own = segment.config
        if own.data.train != config.data.train:
            corpora = open_corpora(own, vocabulary, config.data.verify_hashes, cache)
        length = own.data.sequence_length
        found.append(
            _SegmentSamples(
                segment.first_sample,
                training_rows(own, vocabulary, corpora, segment.stage),
                form_targets(own, vocabulary, length, Purpose.TRAINING_MASK),
                step_forms(own, segment.first_sample),
                _Statistics(*np.zeros((2, length), np.int64)),
            )
        )
    return found


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


def _open_generator(path: Path, tokenizer: Tokenizer) -> Generate:
    """Open the generator of a run or checkpoint of replaced-token detection.

    The noise of its draws is that of training; there is no dropout, and attention crosses
    documents.

    Raises:
        CheckpointError: there is no model, or a damaged one.
        ConfigError: it has no generator, or another tokenizer.
    """
    import torch

    from megatron_deberta.hf.loading import build_model, open_trained_model
    from megatron_deberta.model import DropoutSeeds, ModelInputs
    from megatron_deberta.objectives.rtd import draws

    with refusals():
        trained = open_trained_model(path)
    run = trained.run
    if run.model.head != "rtd":
        raise ConfigError(
            f"--generator {path}: objective.name={run.objective.name} draws no pieces"
        )
    if trained.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"--generator {path} was trained with another tokenizer than the samples'"
        )
    with refusals():
        model = build_model(*trained.open("generator"))

    @torch.no_grad()
    def generate(tokens: Integers, positions: Integers, sample: int) -> Integers:
        logits = model.logits(ModelInputs(torch.from_numpy(tokens)[None]))[0, positions]
        step = sample // run.train.global_batch_size
        keys = DropoutSeeds(run.train.seed, step, torch.tensor([sample]))
        draw = draws(keys, torch.from_numpy(positions)[None], run.rtd.excluded_ids)
        drawn: Integers = draw(logits)[1].numpy()
        return drawn

    return generate


def _without_space(text: str) -> str:
    """Return a piece without the space before a word; a space alone as an open box."""
    return text.lstrip(" ") or "\u2423"


@dataclass
class _Statistics:
    """Sums over samples.

    Attributes:
        targets_at: [N] targets at each position.
        tokens_at: [N] rows with a token there.
        fates: what stands at the targets.
        spans: runs of adjacent targets, by length in pieces.
        parts: documents, or segments of pairs.
        labels: labels of pairs.
        autoregressive: number of autoregressive rows, which count nowhere else.
    """

    targets_at: Integers
    tokens_at: Integers
    fates: Counter[str] = field(default_factory=Counter)
    spans: Counter[int] = field(default_factory=Counter)
    parts: int = 0
    labels: Counter[int] = field(default_factory=Counter)
    autoregressive: int = 0

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
        is_mask, is_kept = now == vocabulary.mask_id, now == masked.labels
        for name, found in (
            ("[MASK]", is_mask), ("kept", is_kept), ("random", ~(is_mask | is_kept))
        ):  # fmt: skip
            self.fates[name] += int(found.sum())
        breaks = np.flatnonzero(np.diff(masked.positions) > 1) + 1
        if masked.positions.size:
            self.spans.update(span.size for span in np.split(masked.positions, breaks))

    def report(self) -> str:
        """Return the averages as lines."""
        rows = max(int(self.tokens_at[0]), 1)
        targets = max(int(self.targets_at.sum()), 1)
        parts = zip(
            np.array_split(self.targets_at, _NUM_BINS),
            np.array_split(self.tokens_at, _NUM_BINS),
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
                f"  tokens a row        {self.tokens_at.sum() / rows:.1f} of {self.tokens_at.size}",
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


def _inspect_shards(args: argparse.Namespace) -> None:
    """Print statistics of all shards named, together."""
    length, top = args.sequence_length, args.top
    prefixes = shard_names(args)
    shards = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer = _shard_tokenizer(prefixes, args.tokenizer)
    statistics = count_shards(shards, _MOST_TOKENS)
    lengths = document_lengths(shards)
    packings = {name: count(lengths, length) for name, count in PACKINGS.items()}
    print(_shard_summary(shards, statistics))
    print(_lengths_text(statistics, length, lengths, packings))
    if top:
        print(_frequent_text(statistics, tokenizer, top))
    for line in _document_beginnings(shards, tokenizer, args.num_samples):
        print(line)
    if tokenizer is None:
        print("\nno manifest names a tokenizer: give --tokenizer to see text")
    if args.plot:
        _draw_lengths(args.plot, lengths, length)
        print(f"\nplot: {args.plot}")


def _shard_tokenizer(prefixes: Sequence[str], path: str) -> Tokenizer | None:
    """Load the tokenizer given, or else the shards' own; None where no manifest names one.

    Raises:
        DataError: the shards are not all of that tokenizer, so their ids mean something else.
    """
    manifests = {prefix: found for prefix in prefixes if (found := read_manifest(prefix))}
    for prefix, manifest in manifests.items():
        first, other = next(iter(manifests.items()))
        if manifest.tokenizer_fingerprint != other.tokenizer_fingerprint:
            raise DataError(
                f"{prefix}: the tokenizer is not that of {first}: fingerprint "
                f"{manifest.tokenizer_fingerprint} ({manifest.tokenizer_path}), there "
                f"{other.tokenizer_fingerprint} ({other.tokenizer_path}); inspect them apart"
            )
    if not manifests:
        return load_tokenizer(path) if path else None
    prefix, manifest = next(iter(manifests.items()))
    tokenizer = load_tokenizer(path or manifest.tokenizer_path)
    if tokenizer.fingerprint != manifest.tokenizer_fingerprint:
        raise DataError(
            f"{prefix}: the shard was made with another tokenizer: fingerprint "
            f"{tokenizer.fingerprint[:12]} ({path or manifest.tokenizer_path}), manifest "
            f"{manifest.tokenizer_fingerprint[:12]} ({manifest.tokenizer_path}); give that as "
            "--tokenizer, or preprocess again"
        )
    return tokenizer


def _shard_summary(shards: Sequence[IndexedDataset], statistics: ShardStatistics) -> str:
    size = sum(shard.num_tokens * shard.dtype.itemsize for shard in shards)
    types = ", ".join(sorted({shard.dtype.name for shard in shards}))
    empty = f" ({statistics.num_empty:,} more are empty)" if statistics.num_empty else ""
    return (
        f"{len(shards)} shard{'s' * (len(shards) > 1)}: {statistics.num_documents:,} documents"
        f"{empty}, {statistics.num_sequences:,} sequences, {statistics.num_tokens:,} tokens, "
        f"{types}, {size / 1e6:,.1f} MB"
    )


def _lengths_text(
    statistics: ShardStatistics,
    sequence_length: int,
    lengths: Integers,
    packings: dict[str, Packing],
) -> str:
    mean = statistics.num_tokens / statistics.num_documents
    named = "  ".join(
        f"{share:.0%}: {length:,}"
        for share, length in zip(QUANTILES, statistics.quantiles, strict=True)
    )
    rows = [
        f"\ntokens a document: mean {mean:,.1f}, {statistics.shortest:,} to {statistics.longest:,}",
        f"  {named}",
    ]
    most = max(int(statistics.histogram.max()), 1)
    for exponent, count in enumerate(statistics.histogram.tolist()):
        bar = "#" * round(_BAR * count / most)
        span = f"{1 << exponent:,}-{(2 << exponent) - 1:,}"
        rows.append(f"  {span:>19} {count:>12,}  {bar}".rstrip())
    longer = float((lengths > sequence_length - 2).mean())
    rows.append(f"\nrows of {sequence_length} tokens ({longer:.1%} of documents are longer):")
    rows += [
        f"  {name:<15} {packing.rows:>12,} rows an epoch, {packing.filled:.2%} filled"
        for name, packing in packings.items()
    ]
    return "\n".join(rows)


def _frequent_text(statistics: ShardStatistics, tokenizer: Tokenizer | None, top: int) -> str:
    counts, total = statistics.token_counts, statistics.tokens_counted
    order = np.argsort(-counts, kind="stable")[:top]
    used = int((counts > 0).sum())
    known = "" if tokenizer is None else f" of {tokenizer.vocab_size:,}"
    rows = [f"\nmost frequent of {total:,} tokens ({used:,}{known} ids come):"]
    for token in order.tolist():
        if counts[token]:
            piece = "" if tokenizer is None else repr(tokenizer.piece_text(token))
            rows.append(f"  {token:>7} {counts[token] / total:>8.3%}  {piece}".rstrip())
    if tokenizer is not None:
        unknown = int(counts[tokenizer.unk_id]) if tokenizer.unk_id < len(counts) else 0
        rows.append(f"  unknown: {unknown / total:.4%}")
    return "\n".join(rows)


def _document_beginnings(
    shards: Sequence[IndexedDataset], tokenizer: Tokenizer | None, count: int
) -> list[str]:
    """Return the beginnings of documents that are spread evenly over all."""
    lines = []
    numbers = np.cumsum([0, *(shard.num_documents for shard in shards)])
    for chosen in np.unique(np.linspace(0, numbers[-1] - 1, count).astype(np.int64)).tolist():
        place = int(np.searchsorted(numbers, chosen, side="right")) - 1
        local = chosen - int(numbers[place])
        tokens = shards[place].document(local)
        begin = tokens[:_SAMPLE_TOKENS].tolist()
        text = " ".join(map(str, begin)) if tokenizer is None else tokenizer.decode(begin)
        more = " ..." if tokens.size > _SAMPLE_TOKENS else ""
        name = os.path.basename(shards[place].prefix)
        lines.append(f"\n{name}, document {local} ({tokens.size:,} tokens):\n  {text}{more}")
    return lines


def _draw_lengths(path: Path, lengths: Integers, sequence_length: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    bins = np.geomspace(1, max(int(lengths.max()), 2) + 1, 60).tolist()
    axes.hist(lengths, bins, label="documents")
    axes.hist(lengths, bins, weights=lengths / lengths.mean(), histtype="step", label="tokens")
    axes.axvline(sequence_length, color="black", linestyle=":", label=f"{sequence_length} tokens")
    axes.set_xscale("log")
    axes.set_xlabel("tokens a document")
    axes.set_ylabel("documents (tokens: scaled to the same area)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = temporary_name(path)
    figure.savefig(fresh, format="png", dpi=120)
    fresh.replace(path)


SUBCOMMANDS = {
    "data": Subcommand(_DATA_TEXT, _add_data_arguments, _inspect_data),
    "shards": Subcommand(_SHARDS_TEXT, _add_shards_arguments, _inspect_shards),
}
