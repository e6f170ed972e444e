#!/usr/bin/env bash
# First contact with a GPU: correctness, attention, whole steps. A start takes at most nine minutes;
# the next one goes on where it ended.
#
#   launch/gpu_carry.sh                                  before, on a machine with network
#   launch/gpu_first_contact.sh [--only STAGE ...]       on the machine with the GPU
#   launch/gpu_first_contact.sh --device cpu --small     a rehearsal on a CPU
#
# Results go to $OUT, or to --out. Options: python -m benchmarks.gpu.first_contact --help
#
# Environment:
#   PYTHON    interpreter that has torch (default: python3)
#   CARRIED   folder of launch/gpu_carry.sh (default: .first_contact)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
export CARRIED="${CARRIED:-$PWD/.first_contact}"
if compgen -G "$CARRIED/wheels/*.whl" >/dev/null; then
  wheels="$(cat "$CARRIED"/wheels/*.whl | sha256sum | cut -c1-12)"
  site="${TMPDIR:-/tmp}/megatron_deberta_first_contact_$wheels"
  if [[ ! -e "$site" ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
      --target "$site.tmp" "$CARRIED"/wheels/*.whl
    mv "$site.tmp" "$site"
  fi
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$python" -m benchmarks.gpu.first_contact "$@"
