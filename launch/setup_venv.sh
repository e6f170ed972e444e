#!/usr/bin/env bash
# Makes .venv beside this repository and installs what is needed; done in no time when it is there.
#
#   launch/setup_venv.sh          what training needs
#   launch/setup_venv.sh --dev    and what the tests and checks need
#
# Environment:
#   PYTHON                  interpreter to build on (3.10 or newer); default: the first that fits
#   MEGATRON_DEBERTA_TORCH  what `pip install` is given to install torch, options included;
#                           default: torch==2.13.0. Without a GPU, the CPU build saves gigabytes.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# The real path: venv --clear would empty the target of a link and then refuse it.
venv="$(readlink -m "$root/.venv")"
torch="${MEGATRON_DEBERTA_TORCH:-torch==2.13.0}"
megatron_core="megatron-core==0.16.1"

fail() {
  echo "setup_venv: error: $*" >&2
  exit 1
}

case "${1:-}" in
  "") kind=run requirements=requirements.txt ;;
  -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
  --dev) kind=dev requirements=requirements-dev.txt ;;
  *)
    echo "setup_venv: error: unknown argument '$1'; the only one is --dev" >&2
    exit 2
    ;;
esac

fits() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then
      command -v "$candidate"
      return
    fi
    [[ "$candidate" != "${PYTHON:-}" ]] || return 1
  done
  return 1
}

mkdir -p "$venv"
# Two of us at once (a test run beside the quickstart) take turns.
exec 9>"$venv/.lock"
flock 9

cd "$root"
wanted="$(cat requirements.txt requirements-dev.txt setup.py pyproject.toml <(echo "$torch $root") | sha256sum)"
installed() {
  [[ -f "$venv/.stamp-$1" && "$(cat "$venv/.stamp-$1")" == "$wanted" ]]
}
# A development environment is a training environment as well.
if { installed "$kind" || installed dev; } && "$venv/bin/python" -c '' 2>/dev/null; then
  exit 0
fi
rm -f "$venv/.stamp-run" "$venv/.stamp-dev"

# An environment that was moved with its repository has scripts that point to its old place.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 || ! fits "$venv/bin/python" ||
  ! grep -qsF "$venv/" "$venv/bin/pip"; then
  python="$(find_python)" || fail "no Python 3.10 or newer with venv and pip found; install one" \
    "(Debian: apt install python3-venv) or name it: PYTHON=/path/to/python3"
  echo "Making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi

pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"
}

echo "Installing $torch and $requirements into $venv (minutes, the first time)"
# Word splitting is what lets MEGATRON_DEBERTA_TORCH carry options.
# shellcheck disable=SC2086
pip $torch
pip -r "$requirements"
if [[ "$kind" == dev ]]; then
  pip --no-deps "$megatron_core"
fi
# Compatible mode adds a path instead of an import hook: from the folder above a clone of the same
# name, Python would import the clone as a namespace package.
pip --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
echo "$wanted" >"$venv/.stamp-$kind"
echo "Done. Next: source .venv/bin/activate; megatron-deberta --help"
