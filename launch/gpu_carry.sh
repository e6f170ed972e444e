#!/usr/bin/env bash
# Makes .first_contact, the folder that launch/gpu_first_contact.sh needs on a machine without
# network whose image has torch 2.11 and Triton 3.6: wheels of this project's other packages and of
# the peers, and a newer ptxas, which is tried if the kernels' results are wrong. To let a second
# start skip what passed, add stages.jsonl (and triton.tar.xz) of the first start.
#
#   launch/gpu_carry.sh
#
# Environment:
#   PYTHON   interpreter of the target's version, 3.12 (default: python3.12)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3.12}"
folder=.first_contact
limit=$((64 * 1024 * 1024))
packages=annotated-types,argcomplete,awkward,awkward-cpp,deepspeed,gigatoken,hjson,isal,omegaconf,orjson,plotext
packages+=,pydantic,pydantic-core,rensa,sentencex,seqeval,typing-inspection,zstandard

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
PYTHON="$python" launch/wheelhouse.sh --python 3.12 --torch-version 2.11.0 --only "$packages" \
  --output "$work/wheels"
"$python" -m pip --disable-pip-version-check download --quiet --no-deps --dest "$work/wheels" \
  disentangled-flash==1.1.1 flashdeberta==0.0.8
"$python" -m pip --disable-pip-version-check download --quiet --no-deps --dest "$work/nvcc" \
  nvidia-cuda-nvcc==13.5.37
"$python" - "$work" <<'PYTHON'
import lzma
import sys
import zipfile
from pathlib import Path

work = Path(sys.argv[1])
(wheel,) = (work / "nvcc").glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith("/bin/ptxas"))
    (work / "ptxas.xz").write_bytes(lzma.compress(archive.read(name), preset=9 | lzma.PRESET_EXTREME))
PYTHON
mkdir -p "$folder"
rm -rf "$folder/wheels"
mv "$work/wheels" "$work/ptxas.xz" "$folder"
bytes="$(du -sb "$folder" | cut -f1)"
if ((bytes > limit)); then
  echo "gpu_carry: error: $folder has $bytes bytes, more than $limit" >&2
  exit 1
fi
echo "$folder: $(du -sh "$folder" | cut -f1); next, on the GPU's machine: launch/gpu_first_contact.sh"
