#!/usr/bin/env bash
# Style, types and tests; makes .venv where it is missing.
#
#   tests/run.sh                   every feature: the tests that are not marked slow or nightly
#   tests/run.sh --all             what continuous integration runs: the tests not marked nightly
#   tests/run.sh --nightly         everything, with longer runs, more layouts and more faults
#   tests/run.sh tests/unit -k x   the checks, and pytest with these arguments
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Half of a test's time is waiting for processes to start and end, so three pytest workers for two cores.
# nproc would answer with OMP_NUM_THREADS where that is set.
workers="$(($(env -u OMP_NUM_THREADS nproc) < 2 ? 1 : 3))"
parallel=(-n "$workers" --dist loadfile --junitxml=.pytest_cache/junit.xml)
case "${1:-}" in
  "") set -- "${parallel[@]}" -m "not slow and not nightly" ;;
  --all) set -- "${parallel[@]}" -m "not nightly" "${@:2}" ;;
  --nightly) set -- "${parallel[@]}" "${@:2}" ;;
esac
launch/setup_venv.sh --dev
export PATH="$PWD/.venv/bin:$PATH"
# PYTHON names the interpreter that .venv is made with; launch/pretrain.sbatch would run ranks with it.
unset PYTHON

# Otherwise each of the several hundred processes that tests start compiles the package anew.
unset PYTHONDONTWRITEBYTECODE
# One thread per process: distributed tests start up to four processes.
export OMP_NUM_THREADS=1
export DS_ACCELERATOR=cpu
export TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1

SECONDS=0
mkdir -p .pytest_cache
finish() {
  [[ -z "${types:-}" ]] || kill "$types" 2>/dev/null || true
  [[ -z "${memory:-}" ]] || rm -rf "$memory"
  printf "tests/run.sh: %d min %d s after installation\n" $((SECONDS / 60)) $((SECONDS % 60))
}
trap finish EXIT
# The tests flush thousands of small files to disk; in memory that takes no time.
if [[ -z "${TMPDIR:-}" && "$(df --output=avail -BG /dev/shm 2>/dev/null | tail -n 1 | tr -dc 0-9)" -ge 6 ]]; then
  memory="$(mktemp -d /dev/shm/tests.XXXXXX)"
  export TMPDIR="$memory"
fi
ruff format --check .
ruff check .
codespell
# Otherwise the first ranks all compile the CPU kernels at the same time.
python -c "from megatron_deberta.ops.native.build import library; library()" &
# Types are checked beside the tests, which wait for processes half of the time.
mypy >.pytest_cache/mypy.txt 2>&1 &
types=$!
command -v chromium chromium-browser google-chrome >/dev/null || echo "tests/run.sh: no chromium, so tests that open pages in it are skipped" >&2
# Longer time slices, where the system has them: the ranks of a test exchange small messages on few
# cores, and switching between them costs about a tenth of the time.
batch=(chrt --batch 0)
"${batch[@]}" true 2>/dev/null || batch=()
failed=0
"${batch[@]}" python -m pytest "$@" || failed=$?
wait "$types" || failed=1
cat .pytest_cache/mypy.txt
exit "$failed"
