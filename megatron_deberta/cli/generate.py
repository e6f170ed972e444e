"""Continue texts with a model that predicts next tokens.

MODEL is a run or a checkpoint of `pretrain` with objective.name=autoregressive or =mlm+ar; of a
run, the newest checkpoint is used. Without --temperature the most probable token is appended each
time (greedy). A text ends at [SEP], at --max-new-tokens, or at the model's last position. Keys and
values are cached, so a new token costs a forward pass of that token.

Examples:
  megatron-deberta generate runs/mt "Once upon a time" --max-new-tokens 40
  megatron-deberta generate runs/mt "The old man" --temperature 0.8 --top-k 50 --seed 7
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_deberta.cli.arguments import add_shared, number
from megatron_deberta.errors import ConfigError, refusals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    parser.add_argument("model", metavar="MODEL", help="run or checkpoint")
    parser.add_argument("text", nargs="+", metavar="TEXT", help="beginning of a text")
    parser.add_argument(
        "--max-new-tokens", type=number(int, 1), default=50, metavar="N",
        help="most new tokens of each text",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=number(float, 0), default=0.0, metavar="T",
        help="divides the logits before a token is drawn; 0: greedy (default)",
    )  # fmt: skip
    parser.add_argument(
        "--top-k", type=number(int, 1), metavar="K", help="draw from the K most probable tokens"
    )
    parser.add_argument(
        "--top-p", type=number(float, 0, 1), metavar="P",
        help="draw from the most probable tokens that have the probability P together",
    )  # fmt: skip
    add_shared(parser, "--seed", help="of the draws (default 0)")
    add_shared(parser, "--tokenizer")


def run(args: argparse.Namespace) -> None:
    """Print the texts with their continuations."""
    from megatron_deberta.hf.generation import Sampling, open_generator

    if args.temperature == 0:
        for name in ("top_k", "top_p", "seed"):
            if (value := getattr(args, name)) is not None:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {value} needs --temperature above 0")
    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=1.0 if args.top_p is None else args.top_p,
        seed=args.seed or 0,
    )
    with refusals():
        generator = open_generator(Path(args.model), args.tokenizer)
        for text in args.text:
            print(generator.generate(text, args.max_new_tokens, sampling))
