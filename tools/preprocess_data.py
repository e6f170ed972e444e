"""Turn text into shards with the flags of Megatron-LM's script: ``cli/megatron_flags.py``."""

import sys

from megatron_deberta.cli.megatron_flags import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
