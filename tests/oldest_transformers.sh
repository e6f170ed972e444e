#!/usr/bin/env bash
# Tests `megatron_deberta.hf.use_fast_attention` and our exports with the oldest supported
# transformers, and inside other libraries, of which GLiNER requires an older transformers than
# requirements.txt names.
#
#   tests/oldest_transformers.sh           continuous integration calls it (.ci/run)
#   tests/oldest_transformers.sh -k lora   with these arguments for pytest
#
# Installs it in .venv/oldest and puts that folder before the packages of .venv.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
packages=(transformers==5.0.0 tokenizers==0.22.2 huggingface-hub==1.33.0)
launch/setup_venv.sh --dev
export PATH="$PWD/.venv/bin:$PATH"
folder="$PWD/.venv/oldest"
if [[ "$(cat "$folder/.stamp" 2>/dev/null)" != "${packages[*]}" ]]; then
  rm -rf "$folder"
  # Without dependencies: the others are those of .venv.
  python -m pip --disable-pip-version-check install --quiet --no-deps --target "$folder" "${packages[@]}"
  echo "${packages[*]}" >"$folder/.stamp"
fi

export PYTHONPATH="$folder:$PWD" OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python -c 'import transformers; print("transformers", transformers.__version__)'
python -m pytest -n 2 --dist loadfile tests/parity/test_fast_attention.py tests/parity/test_other_libraries.py \
  tests/judges/test_transformers_classes.py tests/judges/test_libraries.py "$@"
