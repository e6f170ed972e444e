#!/usr/bin/env bash
# Queue a run on a SLURM cluster: `megatron-deberta submit`, with this repository's environment.
#
#   launch/submit.sh RUN.yaml --cluster dgx2 --nodes 16 [section.key=value ...]
#
# launch/submit.sh --help lists the options. Without the submitter: launch/pretrain.sbatch.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m megatron_deberta submit "$@"
