"""``python -m megatron_deberta`` is the ``megatron-deberta`` command."""

import sys

from megatron_deberta.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
