"""Learn a vocabulary from text: ``megatron-deberta train-tokenizer``."""

import sys

from megatron_deberta.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train-tokenizer", *sys.argv[1:]]))
