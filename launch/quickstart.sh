#!/usr/bin/env bash
# From text to a model that fills masks, on any Linux machine with Python, in about eight minutes.
#
#   launch/quickstart.sh                     text of this machine (Python's own documentation)
#   launch/quickstart.sh --input F [F ...]   your text: JSONL, .gz, .zst, plain text, globs
#
# Learns a vocabulary of 8K pieces, makes shards, pretrains a small DeBERTa with two tensor-parallel
# ranks and ZeRO-1, kills the job once and starts it again, exports the model to Hugging Face format
# and lets it fill masks. Everything lies in runs/quickstart (QUICKSTART_DIR names another folder),
# which is made anew. Exits non-zero unless the model beats the unigram distribution by 0.5 nat.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${QUICKSTART_DIR:-runs/quickstart}"
inputs=()
if [[ $# -gt 0 ]]; then
  if [[ "$1" != --input || $# -lt 2 ]]; then
    sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [[ "$1" == --help || "$1" == -h ]] && exit 0
    echo "quickstart: error: the only option is --input FILE..., got: $*" >&2
    exit 2
  fi
  shift
  inputs=("$@")
fi

say() { printf '\n== %s\n' "$*"; }

launch/setup_venv.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1
started=$SECONDS
if [[ -e "$out" && ! -e "$out/.quickstart" ]]; then
  echo "quickstart: error: $out is there and not ours; set QUICKSTART_DIR to another folder" >&2
  exit 2
fi
rm -rf "$out"
mkdir -p "$out"
touch "$out/.quickstart"

if [[ ${#inputs[@]} -eq 0 ]]; then
  say "1/6 Gathering text from this machine"
  tools/gather_machine_text.py --output "$out/text.jsonl" --max-mb 8
  inputs=("$out/text.jsonl")
else
  say "1/6 Text: ${inputs[*]}"
fi

say "2/6 Learning a vocabulary of 8,192 pieces"
megatron-deberta train-tokenizer --input "${inputs[@]}" --vocab-size 8192 --output "$out/tokenizer"

say "3/6 Tokenizing into shards"
megatron-deberta preprocess --input "${inputs[@]}" --tokenizer "$out/tokenizer" --output "$out/text"

pretrain() {
  # torchrun's own log has nothing to say here unless a rank fails.
  torchrun --nproc-per-node 2 --log-dir "$out/torchrun" -m megatron_deberta pretrain \
    configs/runs/quickstart.yaml "train.run_dir=$out/run" "tokenizer.path=$out/tokenizer" \
    "data.train=[$out/text_text_document]"
}

say "4/6 Pretraining on two ranks; the job will be killed once, on purpose"
pretrain &
job=$!
# torchrun gives each rank a session of its own, so a process group does not hold them all.
kill_job() {
  python - "$job" <<'PYTHON'
import sys

import psutil

try:
    job = psutil.Process(int(sys.argv[1]))
    processes = [job, *job.children(recursive=True)]
except psutil.NoSuchProcess:
    processes = []
for process in processes:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        continue
psutil.wait_procs(processes, timeout=30)
PYTHON
}
trap kill_job EXIT
until compgen -G "$out/run/checkpoints/step_*/COMMITTED" >/dev/null; do
  if ! kill -0 "$job" 2>/dev/null; then
    wait "$job"
  fi
  sleep 1
done
sleep 10
trap - EXIT
# The shell would announce the death of its child.
{ kill_job; wait "$job" || true; } 2>/dev/null
say "Killed (SIGKILL, every process). Starting it again with the same command"
pretrain

say "5/6 Exporting to Hugging Face format"
megatron-deberta convert --checkpoint "$out/run" --to hf --output "$out/exported"

say "6/6 Filling masks"
if [[ "${inputs[0]}" == "$out/text.jsonl" ]]; then
  megatron-deberta fill-mask "$out/exported" \
    "If the value is [MASK], the default is used." \
    "Return a new array with the [MASK] shape as the input." \
    "This [MASK] is called when the object is created."
else
  megatron-deberta fill-mask "$out/exported" \
    "He looked at [MASK] and said nothing." "It was the best [MASK] of all."
fi

say "Result"
python - "$out/run" <<'PYTHON'
import sys
from pathlib import Path

from megatron_deberta.observe.metrics import read_metrics

run = Path(sys.argv[1])
records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "validation"]
unigram = [r["unigram_loss"] for r in records if "unigram_loss" in r][-1]
loss = [r["loss"] for r in records if "loss" in r][-1]
print(f"validation loss   {loss:.3f} nat a masked token")
print(f"unigram           {unigram:.3f} nat, same targets")
print(f"better by         {unigram - loss:.3f} nat (at least 0.5 wanted)")
print(f"loss curve        {run / 'loss.png'}")
print(f"TensorBoard       tensorboard --logdir {run / 'tensorboard'}")
sys.exit(0 if loss <= unigram - 0.5 else 1)
PYTHON
printf 'model             %s\n' "$out/exported"
printf 'took              %s s after installation\n' "$((SECONDS - started))"
