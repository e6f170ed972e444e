"""Export a checkpoint, or import a release: ``megatron-deberta convert``."""

import sys

from megatron_deberta.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
