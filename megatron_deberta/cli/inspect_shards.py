"""``inspect shards``: statistics of shards, as text and as a picture."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.shards.format import shard_prefixes
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
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import temporary_name
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

SHARD_OPTIONS = {"top": "--top", "plot": "--plot"}
"""What only ``inspect shards`` takes."""
_BAR = 40
_SAMPLE_TOKENS = 60
_MOST_TOKENS = 200_000_000


def add_shard_statistics_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what only ``inspect shards`` takes."""
    group = parser.add_argument_group("inspect shards")
    group.add_argument("--top", type=int, help="most frequent pieces (default 20)")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the document lengths")


def inspect_shards(args: argparse.Namespace) -> int:
    """Print statistics of all shards named, together."""
    length = 512 if args.sequence_length is None else args.sequence_length
    top = 20 if args.top is None else args.top
    if length < 3 or top < 0:
        raise ConfigError("--sequence-length must be at least 3, and --top not negative")
    prefixes = shard_prefixes([*args.prefix, *args.run])
    shards = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer = _tokenizer(prefixes, args.tokenizer)
    statistics = count_shards(shards, _MOST_TOKENS)
    lengths = document_lengths(shards)
    packings = {name: count(lengths, length) for name, count in PACKINGS.items()}
    print(_summary(shards, statistics))
    print(_lengths_text(statistics, length, lengths, packings))
    if top:
        print(_frequent_text(statistics, tokenizer, top))
    for line in _samples(shards, tokenizer, args.num_samples):
        print(line)
    if tokenizer is None:
        print("\nno manifest names a tokenizer: give --tokenizer to see text")
    if args.plot:
        _draw(args.plot, lengths, length)
        print(f"\nplot: {args.plot}")
    return 0


def _tokenizer(prefixes: Sequence[str], path: str) -> Tokenizer | None:
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


def _summary(shards: Sequence[IndexedDataset], statistics: ShardStatistics) -> str:
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
    lengths: npt.NDArray[np.int64],
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


def _samples(
    shards: Sequence[IndexedDataset], tokenizer: Tokenizer | None, count: int
) -> list[str]:
    """Return the beginnings of documents that are spread evenly over all."""
    lines = []
    numbers = np.cumsum([0, *(shard.num_documents for shard in shards)])
    for number in np.unique(np.linspace(0, numbers[-1] - 1, count).astype(np.int64)).tolist():
        place = int(np.searchsorted(numbers, number, side="right")) - 1
        local = number - int(numbers[place])
        tokens = shards[place].document(local)
        begin = tokens[:_SAMPLE_TOKENS].tolist()
        text = " ".join(map(str, begin)) if tokenizer is None else tokenizer.decode(begin)
        more = " ..." if tokens.size > _SAMPLE_TOKENS else ""
        name = os.path.basename(shards[place].prefix)
        lines.append(f"\n{name}, document {local} ({tokens.size:,} tokens):\n  {text}{more}")
    return lines


def _draw(path: Path, lengths: npt.NDArray[np.int64], sequence_length: int) -> None:
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
