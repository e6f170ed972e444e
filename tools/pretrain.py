"""Train, as Megatron's pretrain scripts do: ``megatron-deberta pretrain``."""

import sys

from megatron_deberta.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))
