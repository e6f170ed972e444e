#!/usr/bin/env bash
# Everything that must pass: style, types, tests. Makes .venv itself.
#
#   tests/run.sh                   all of it
#   tests/run.sh tests/unit -k x   the checks, and these arguments to pytest
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup_venv.sh --dev
export PATH="$PWD/.venv/bin:$PATH"

# One thread a process: distributed tests start up to four on what may be two cores.
export OMP_NUM_THREADS=1
export DS_ACCELERATOR=cpu
export TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1

ruff format --check .
ruff check .
mypy
codespell
python -m pytest "$@"
