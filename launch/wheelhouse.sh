#!/usr/bin/env bash
# Builds a folder of wheels from which this project installs where there is no network.
#
#   launch/wheelhouse.sh --output DIR [options]
#
#   --output DIR         folder to make; it must not exist
#   --python X.Y         Python of the target (default: that of the interpreter used here)
#   --platform TAG       of the target, a manylinux tag (default: manylinux_2_28_x86_64)
#   --torch SPEC         bring torch, too: what `pip` is given for it, options included, such as
#                        "torch==2.13.0" (the default CUDA build) or, for GPUs of compute capability
#                        7.0 (V100), a build for CUDA 12.6: "torch==2.13.0+cu126 --index-url URL"
#                        with the address that PyTorch's installation page gives for it.
#                        Without this option the target is taken to have torch already.
#   --torch-version V    the torch that the target has (default: 2.13.0)
#   --requirements FILE  what to bring (default: requirements.txt); may be given several times
#   --only NAME,NAME     of all that, only these: for a target that has the others
#
# On the target:  pip install --no-index --find-links DIR -r DIR/requirements.txt
# Then:           pip install --no-index --no-deps --no-build-isolation -e .
#
# DIR holds the wheels, requirements.txt with their exact versions and SHA256SUMS. Before it appears,
# pip is made to resolve it again without network (with --only: each wheel for itself). Packages
# that have no wheel (DeepSpeed) are built here; that works only for those without compiled code.
#
# Environment:
#   PYTHON   interpreter whose pip is used; default: pythonX.Y of the target, else .venv's, else
#            python3. Conditions such as `python_version < "3.11"` inside other people's packages
#            are judged by it, so it is best of the target's version.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
  echo "wheelhouse: error: $*" >&2
  exit 1
}

usage() {
  echo "wheelhouse: error: $*; see --help" >&2
  exit 2
}

output="" target="" platform="manylinux_2_28_x86_64" torch="" torch_version="2.13.0" only=""
requirements=()
while [[ $# -gt 0 ]]; do
  if [[ "$1" == --help || "$1" == -h ]]; then
    sed -n '2,31s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
  fi
  [[ $# -ge 2 ]] || usage "$1 needs a value"
  case "$1" in
    --output) output="$2" ;;
    --python) target="$2" ;;
    --platform) platform="$2" ;;
    --torch) torch="$2" ;;
    --torch-version) torch_version="$2" ;;
    --requirements) requirements+=("$2") ;;
    --only) only="$2" ;;
    *) usage "unknown option '$1'" ;;
  esac
  shift 2
done
[[ -n "$output" ]] || usage "--output is missing"
[[ ! -e "$output" ]] || fail "$output exists; name a new folder or remove it"
[[ -z "$target" || "$target" =~ ^3\.[0-9]+$ ]] || usage "--python '$target' is not like 3.12"
[[ "$platform" =~ ^manylinux_2_([0-9]+)_([a-z0-9_]+)$ ]] ||
  usage "--platform '$platform' is not like manylinux_2_28_x86_64"
glibc="${BASH_REMATCH[1]}" machine="${BASH_REMATCH[2]}"
[[ ${#requirements[@]} -gt 0 ]] || requirements=("$root/requirements.txt")
for file in "${requirements[@]}"; do
  [[ -f "$file" ]] || fail "--requirements $file does not exist"
done

python=""
for candidate in ${PYTHON:+"$PYTHON"} ${target:+"python$target"} "$root/.venv/bin/python" python3; do
  if "$candidate" -m pip --version >/dev/null 2>&1; then
    python="$candidate"
    break
  fi
done
[[ -n "$python" ]] || fail "no Python with pip found; name one: PYTHON=/path/to/python3"
here="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
target="${target:-$here}"
[[ "$here" == "$target" ]] ||
  echo "wheelhouse: note: conditions of packages are judged by Python $here, not $target;" \
    "PYTHON names another interpreter" >&2

mkdir -p "$(dirname "$output")"
work="$(mktemp -d "$output.XXXXXX.tmp")"
trap 'rm -rf "$work"' EXIT
wheels="$work/wheels" extra="$work/extra"
mkdir "$wheels" "$extra"

pip() {
  "$python" -m pip --disable-pip-version-check "$@"
}

# pip compares platform tags by name: every older manylinux is named, with its old alias.
tags=(--implementation cp --python-version "$target" --only-binary=:all:)
for ((minor = glibc; minor >= 5; minor--)); do
  tags+=(--platform "manylinux_2_${minor}_$machine")
  case "$minor" in
    17) tags+=(--platform "manylinux2014_$machine") ;;
    12) tags+=(--platform "manylinux2010_$machine") ;;
    5) tags+=(--platform "manylinux1_$machine") ;;
  esac
done

# Our own conditions are judged for the target; torch's place is held where it is not brought.
"$python" - "$target" "$machine" "$work" "${torch:+brought}" "$torch_version" \
  "${requirements[@]}" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

from pip._vendor.packaging.requirements import InvalidRequirement, Requirement

target, machine, work, torch, torch_version, *files = sys.argv[1:]
environment = {
    "python_version": target,
    "python_full_version": f"{target}.0",
    "platform_machine": machine,
    "sys_platform": "linux",
    "platform_system": "Linux",
    "implementation_name": "cpython",
}
wanted = []


def read(path):
    for line in path.read_text().splitlines():
        line = line.split(" #")[0].strip()
        if line.startswith("-r "):
            read(path.parent / line[3:].strip())
        elif line and not line.startswith("#"):
            try:
                requirement = Requirement(line)
            except InvalidRequirement as wrong:
                sys.exit(f"wheelhouse: error: {path}: {line!r} is no requirement: {wrong}")
            if requirement.marker is None or requirement.marker.evaluate(environment):
                requirement.marker = None
                wanted.append(str(requirement))


for name in files:
    read(Path(name))
if not torch:
    # pip has to see some torch, or it would bring the real one: DeepSpeed asks for it. The local
    # version tells it from the real one.
    torch_version += "+target"
    wanted.append(f"torch=={torch_version}")
    info = f"torch-{torch_version}.dist-info"
    with zipfile.ZipFile(Path(work, "extra", f"torch-{torch_version}-py3-none-any.whl"), "w") as z:
        z.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {torch_version}\n"
        )
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
Path(work, "wanted.txt").write_text("\n".join(wanted) + "\n")
PYTHON

echo "Collecting for Python $target on $platform"
# Word splitting is what lets --torch carry options.
# shellcheck disable=SC2206
asked=($torch)
# A package without a wheel is built; what it needs is then looked for again.
until pip download --quiet "${tags[@]}" --find-links "$extra" --dest "$wheels" \
  -r "$work/wanted.txt" "${asked[@]}" >"$work/log" 2>&1; do
  missing="$(sed -n 's/.*No matching distribution found for \([^ ;(]*\).*/\1/p' "$work/log" | head -1)"
  [[ -n "$missing" && ! -e "$work/built-$missing" ]] ||
    fail "pip cannot collect the wheels:"$'\n'"$(grep -v '^WARNING' "$work/log" | tail -5)"
  touch "$work/built-$missing"
  echo "Building $missing, which has no wheel for that"
  # First with the build tools that the package names; without them where the index has none.
  pip wheel --quiet --no-deps --wheel-dir "$work/new" "$missing" >"$work/log" 2>&1 ||
    pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/new" "$missing" \
      >>"$work/log" 2>&1 || fail "$missing is not to be had for Python $target on $platform, neither" \
    "as a wheel nor to build:"$'\n'"$(grep -v '^WARNING' "$work/log" | tail -5)"
  for wheel in "$work"/new/*.whl; do
    [[ "$wheel" == *-none-any.whl ]] ||
      fail "${wheel##*/} holds code compiled for this machine; build $missing on one like the target"
    mv "$wheel" "$extra"
  done
done
[[ -n "$torch" ]] || rm -f "$wheels/torch-$torch_version+target-py3-none-any.whl"

# What to keep, and the exact versions.
"$python" - "$wheels" "$only" <<'PYTHON'
import sys
from pathlib import Path

from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

folder, only = Path(sys.argv[1]), sys.argv[2]
found = {parse_wheel_filename(path.name)[0]: path for path in folder.glob("*.whl")}
if only:
    names = {canonicalize_name(name) for name in only.replace(",", " ").split()}
    if unknown := sorted(names - set(found)):
        sys.exit(f"wheelhouse: error: --only {','.join(unknown)}: not among {', '.join(sorted(found))}")
    for name in set(found) - names:
        found.pop(name).unlink()
pins = sorted(f"{name}=={parse_wheel_filename(path.name)[1]}" for name, path in found.items())
(folder / "requirements.txt").write_text("\n".join(pins) + "\n")
PYTHON

alone=()
[[ -z "$only" ]] || alone=(--no-deps)
# Not `pip install --dry-run`: that judges by the Python it runs on.
pip download --quiet --no-index --find-links "$wheels" --find-links "$extra" "${tags[@]}" \
  "${alone[@]}" --dest "$work/again" -r "$wheels/requirements.txt" >"$work/log" 2>&1 ||
  fail "the collected wheels do not install:"$'\n'"$(grep -v '^WARNING' "$work/log" | tail -5)"
(cd "$wheels" && sha256sum ./*.whl >SHA256SUMS)
mv "$wheels" "$output"
count="$(find "$output" -name '*.whl' | wc -l)"
echo "$count wheels, $(du -sm "$output" | cut -f1) MB: $output"
echo "On the target: pip install --no-index --find-links $output -r $output/requirements.txt"
