"""Turn text into shards with the flags of Megatron-LM's tools/preprocess_data.py.

Writes PREFIX_KEY_document.bin and .idx, byte for byte those of Megatron-LM's script for the same
tokenizer, and PREFIX_KEY_document.manifest.json. The work is that of `megatron-deberta preprocess`:
compressed input, several nodes and restarts as there.

Example:
  python tools/preprocess_data.py --input corpus.jsonl --output-prefix shards/corpus --append-eod
    --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer/spm.model
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from megatron_deberta.cli.arguments import CommandParser, HelpFormatter, number
from megatron_deberta.cli.main import describe
from megatron_deberta.cli.main import main as run_command
from megatron_deberta.cli.text_job import add_rerun_arguments
from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.errors import ConfigError, MegatronDebertaError
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from megatron_deberta.tokenizer.tokenizer import JSON_FILE

PROGRAM = "tools/preprocess_data.py"
SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
_GPT2_EOD = "<|endoftext|>"
_OWN_COMMAND = "use megatron-deberta preprocess"
_REMEDIES = {
    f"NLTK's sentences are not reproduced; {_OWN_COMMAND} --sentences LANGUAGE": (
        "--split-sentences"
    ),
    "it belongs to --split-sentences; remove it": "--keep-newlines --lang",
    "add the tokens to the tokenizer's files and remove it": (
        "--special-tokens --tokenizer-special-tokens --tokenizer-sentencepiece-legacy "
        "--vocab-extra-ids"
    ),
    "remove it; the tokenizer's files determine the ids": (
        "--tokenizer-hf-no-use-fast --trust-remote-code --tokenizer-metadata --vocab-size "
        "--padded-vocab-size"
    ),
    "tiktoken is not supported; convert the tokenizer to tokenizer.json": (
        "--tiktoken-pattern --tiktoken-num-special-tokens --tiktoken-special-tokens"
    ),
    "remove it; --workers defaults to the processor cores": (
        "--find-optimal-num-workers --workers-to-check --max-documents --performance-dir"
    ),
    f"it is not a flag of Megatron-LM; {_OWN_COMMAND}": "--tokenizer --output --keys --sentences",
}
UNSUPPORTED = {flag: remedy for remedy, flags in _REMEDIES.items() for flag in flags.split()}
"""Flags of Megatron-LM's script that are rejected, and those of our command, with the remedy."""
SUPPORTED_TYPES = (*SENTENCEPIECE_TYPES, "GPT2BPETokenizer", "HuggingFaceTokenizer")


class _MegatronTokenizer(NamedTuple):
    """What Megatron-LM's tokenizer of the same files has, and where ours finds them."""

    path: str
    vocab_size: int
    eod: str
    """Name of the token that ends a document; empty: none."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of Megatron-LM's flags."""
    lines = (__doc__ or "").strip().splitlines()
    parser = CommandParser(
        prog=PROGRAM, description=lines[0], epilog="\n".join(lines[1:]).strip(),
        formatter_class=HelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--input", required=True, metavar="FILE", help="JSON Lines, also .gz; a glob")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold text")
    add("--output-prefix", required=True, metavar="PREFIX", help="prefix of the shards' names")
    add("--tokenizer-type", required=True, metavar="TYPE", help=", ".join(SUPPORTED_TYPES))
    add("--tokenizer-model", metavar="PATH", help="SentencePiece model; Hugging Face folder")
    add("--vocab-file", metavar="FILE", help="GPT2BPETokenizer: *vocab.json")
    add("--merge-file", metavar="FILE", help="GPT2BPETokenizer: *merges.txt in the same folder")
    add(
        "--tokenizer-hf-no-include-special-tokens", action="store_true",
        help="HuggingFaceTokenizer: store no [CLS] and [SEP]; required",
    )  # fmt: skip
    add("--append-eod", action="store_true", help="append the end-of-document token to documents")
    add("--workers", type=number(int, 1), metavar="N", help="processes (default: the CPU cores)")
    add(
        "--partitions", type=number(int, 1), default=1, metavar="N",
        help="accepted with --keep-sequential-samples; changes nothing",
    )  # fmt: skip
    add("--keep-sequential-samples", action="store_true", help="always the case here")
    add("--log-interval", type=number(int, 1), metavar="N", help="ignored: progress is shown")
    add_rerun_arguments(parser, "existing shards")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run ``megatron-deberta preprocess`` for Megatron-LM's flags and return its exit code.

    Args:
        argv: the flags.

    Raises:
        SystemExit: on ``--help``.
    """
    try:
        for argument in argv:
            flag = argument.partition("=")[0]
            if flag in UNSUPPORTED:
                raise ConfigError(f"{flag} is not supported: {UNSUPPORTED[flag]}")
        arguments = translate(build_parser().parse_args(argv))
    except (MegatronDebertaError, OSError) as error:
        print(f"{PROGRAM}: error: {describe(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, MegatronDebertaError) else 1
    return run_command(arguments)


def translate(args: argparse.Namespace) -> list[str]:
    """Return the arguments of ``megatron-deberta`` that have the same effect.

    Raises:
        ConfigError: a flag is missing, or has an effect that is not reproduced.
        DataError: the tokenizer cannot be read.
    """
    if args.partitions > 1 and not args.keep_sequential_samples:
        raise ConfigError(
            f"--partitions {args.partitions} is not supported without --keep-sequential-samples, "
            "since it changes the order of documents; remove it: --workers does not need it"
        )
    for key in args.json_keys:
        if "," in key:
            raise ConfigError(f"--json-keys {key}: separate keys with spaces")
    tokenizer = _find_tokenizer(args)
    _check_dtype(load_tokenizer(tokenizer.path), tokenizer)
    arguments = ["preprocess", "--input", args.input, "--format", "jsonl"]
    arguments += ["--keys", *args.json_keys]
    arguments += ["--tokenizer", tokenizer.path, "--output", args.output_prefix, "--keep-empty"]
    # Megatron-LM's script ends at the first record that it cannot use, and has no longest document.
    arguments += ["--max-bad-fraction", "0", "--max-document-mb", "1e6"]
    if args.tokenizer_type in SENTENCEPIECE_TYPES:
        arguments.append("--sentencepiece")
    if args.append_eod:
        if not tokenizer.eod:
            raise ConfigError(f"--append-eod: {tokenizer.path} declares no end-of-sentence token")
        arguments += ["--append-eod", tokenizer.eod]
    if args.workers:
        arguments += ["--workers", str(args.workers)]
    return arguments + [f"--{name}" for name in ("force", "restart") if getattr(args, name)]


def _find_tokenizer(args: argparse.Namespace) -> _MegatronTokenizer:
    kind = args.tokenizer_type
    if kind in SENTENCEPIECE_TYPES:
        return _sentencepiece(_required(args, "tokenizer_model"))
    if kind == "GPT2BPETokenizer":
        return _gpt2(_required(args, "vocab_file"), _required(args, "merge_file"))
    if kind == "HuggingFaceTokenizer":
        if not args.tokenizer_hf_no_include_special_tokens:
            raise ConfigError(
                "--tokenizer-type HuggingFaceTokenizer would store [CLS] and [SEP] in every "
                "document, which packing adds; add --tokenizer-hf-no-include-special-tokens"
            )
        return _hugging_face(_required(args, "tokenizer_model"))
    raise ConfigError(
        f"--tokenizer-type {kind} is not supported (supported: {', '.join(SUPPORTED_TYPES)}); "
        "convert the tokenizer to tokenizer.json and give its folder as HuggingFaceTokenizer"
    )


def _required(args: argparse.Namespace, name: str) -> str:
    value: str | None = getattr(args, name)
    if value is None:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} is missing; --tokenizer-type {args.tokenizer_type} needs it")
    return value


def _sentencepiece(path: str) -> _MegatronTokenizer:
    load_tokenizer(path)  # for its messages about what is wrong with the file
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=path)
    eos = model.eos_id()
    return _MegatronTokenizer(path, len(model), model.id_to_piece(eos) if eos >= 0 else "")


def _gpt2(vocab_file: str, merge_file: str) -> _MegatronTokenizer:
    folder = Path(vocab_file).parent
    named = vocab_file.endswith("vocab.json") and merge_file.endswith("merges.txt")
    if not named or Path(merge_file).parent != folder or (folder / JSON_FILE).exists():
        raise ConfigError(
            f"--vocab-file {vocab_file} and --merge-file {merge_file} must be *vocab.json and "
            f"*merges.txt in one folder without {JSON_FILE}; copy them to one"
        )
    load_tokenizer(str(folder))
    pieces = orjson.loads(Path(vocab_file).read_bytes())
    return _MegatronTokenizer(str(folder), len(pieces), _GPT2_EOD if _GPT2_EOD in pieces else "")


def _hugging_face(path: str) -> _MegatronTokenizer:
    if not Path(path).is_dir():
        raise ConfigError(f"--tokenizer-model {path}: no such folder; download the tokenizer")
    load_tokenizer(path)
    from transformers import AutoTokenizer

    try:
        model = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tokenizer-model {path}: transformers cannot read it: {error}"
        ) from error
    return _MegatronTokenizer(path, len(model), model.eos_token or model.sep_token or "")


def _check_dtype(tokenizer: Tokenizer, megatron: _MegatronTokenizer) -> None:
    ours, theirs = dtype_for_vocab(tokenizer.vocab_size), dtype_for_vocab(megatron.vocab_size)
    if ours != theirs:
        raise ConfigError(
            f"{megatron.path}: Megatron-LM stores {megatron.vocab_size} ids as {theirs}, "
            f"megatron_deberta {tokenizer.vocab_size} rows as {ours}; {_OWN_COMMAND}"
        )
