"""Turn text into shards, as Megatron's script does: ``megatron-deberta preprocess``."""

import sys

from megatron_deberta.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
