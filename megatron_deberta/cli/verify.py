"""Check shards: structure, hashes, counts and the range of every id; exit 1 if one is damaged.

megatron-deberta verify --prefix SHARD [--prefix SHARD ...] [--tokenizer DIR]
"""

from __future__ import annotations

import argparse
import sys

from megatron_deberta.data.indexed_dataset import IndexedDataset
from megatron_deberta.data.manifest import check_counts, read_manifest, verify_hashes
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE, DataError
from megatron_deberta.tokenizer import load_tokenizer

_CHUNK_TOKENS = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--prefix", action="append", required=True, help="shard to check; may be repeated"
    )
    parser.add_argument("--tokenizer", default="", help="check that the shards are of this one")


def run(args: argparse.Namespace) -> int:
    """Check every shard and print one line each."""
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    fingerprint = tokenizer.fingerprint if tokenizer else None
    vocab_size = tokenizer.vocab_size if tokenizer else None
    code = EXIT_DONE
    for prefix in args.prefix:
        try:
            print(f"{prefix}: {verify_shard(prefix, fingerprint, vocab_size)}")
        except DataError as error:
            print(f"{prefix}: BAD: {error}", file=sys.stderr)
            code = EXIT_FAILURE
    return code


def verify_shard(prefix: str, fingerprint: str | None, vocab_size: int | None) -> str:
    """Read all of a shard and describe it.

    Args:
        prefix: path without suffix.
        fingerprint: of the tokenizer it must be of; None does not compare.
        vocab_size: ids must be below it; None takes the manifest's.

    Raises:
        DataError: what is wrong with it.
    """
    shard = IndexedDataset(prefix)
    manifest = read_manifest(prefix)
    checked = "no manifest, so hashes not checked"
    if manifest is not None:
        check_counts(shard, manifest)
        verify_hashes(prefix, manifest)
        if fingerprint not in (None, manifest.tokenizer_fingerprint):
            raise DataError(
                f"{prefix}: made with tokenizer {manifest.tokenizer_fingerprint} "
                f"({manifest.tokenizer_path}), not {fingerprint}"
            )
        vocab_size = vocab_size or manifest.vocab_size
        checked = "hashes as in the manifest"
    smallest, largest = _id_range(shard)
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        raise DataError(
            f"{prefix}.bin: ids {smallest}..{largest} are outside the vocabulary of {vocab_size}; "
            "preprocess again"
        )
    return (
        f"good: {shard.num_documents:,} documents, {shard.num_tokens:,} tokens, "
        f"{shard.dtype}, ids {smallest}..{largest}, {checked}"
    )


def _id_range(shard: IndexedDataset) -> tuple[int, int]:
    extremes = []
    for begin in range(0, shard.num_tokens, _CHUNK_TOKENS):
        tokens = shard.tokens(begin, min(begin + _CHUNK_TOKENS, shard.num_tokens))
        extremes += [int(tokens.min()), int(tokens.max())]
    return min(extremes), max(extremes)
