#!/usr/bin/env bash
# From text to a model that fills masks, on any Linux machine with Python, in about eight minutes.
#
#   launch/quickstart.sh                     prose of this machine (documentation of Python packages)
#   launch/quickstart.sh --input F [F ...]   your text: JSONL, .gz, .zst, plain text, globs
#
# Holds out 5 % of the documents, trains a vocabulary of 8,192 pieces, makes shards, pretrains a small
# DeBERTa with two tensor-parallel ranks and ZeRO-1, kills the job once and starts it again, exports
# the model to Hugging Face format, and fills one mask in each of 40 held-out sentences. All files are
# in runs/quickstart (QUICKSTART_DIR names another folder), which is made anew. Exits non-zero unless
# the validation loss is at least 1 nat below that of the unigram distribution.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${QUICKSTART_DIR:-runs/quickstart}"
seconds=480
inputs=()
if [[ $# -gt 0 ]]; then
  if [[ "$1" != --input || $# -lt 2 ]]; then
    sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
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
  say "1/7 Gathering prose from this machine"
  tools/gather_machine_text.py --output "$out/text.jsonl"
  inputs=("$out/text.jsonl")
else
  say "1/7 Text: ${inputs[*]}"
fi

say "2/7 Holding out 5 % of the documents for validation"
megatron-deberta split --input "${inputs[@]}" --output "$out/text"

say "3/7 Training a vocabulary of 8,192 pieces"
megatron-deberta train-tokenizer --input "$out/text/train" --vocab-size 8192 --output "$out/tokenizer"

say "4/7 Tokenizing into shards"
for part in train validation; do
  megatron-deberta preprocess --input "$out/text/$part" --tokenizer "$out/tokenizer" \
    --output "$out/shards/$part"
done

# The faster of the two dtypes on this processor.
dtype="$(python - <<'PYTHON'
import torch

from megatron_deberta.observe.throughput import measure_matmul_rate

torch.set_num_threads(1)
rates = {
    name: measure_matmul_rate(torch.device("cpu"), dtype)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
}
print(max(rates, key=rates.get))
PYTHON
)"
# The same number on every machine that is fast enough: the same text then gives the same model on the
# same processor.
full_steps=1600
pretrain() {
  # torchrun's own log has nothing to say here unless a rank fails.
  torchrun --nproc-per-node 2 --log-dir "$out/torchrun" -m megatron_deberta pretrain \
    configs/runs/quickstart.yaml "train.run_dir=$out/run" "tokenizer.path=$out/tokenizer" \
    "data.train=[$out/shards/train_text_document]" \
    "data.validation=[$out/shards/validation_text_document]" "precision.dtype=$dtype" \
    "train.steps=$1" "train.eval_every=$(($1 / 4))" "${@:2}"
}

say "5/7 Pretraining on two ranks; the job will be killed once, on purpose"
pretrain_started=$SECONDS
pretrain "$full_steps" checkpoint.save_every=100 &
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
newest() { compgen -G "$out/run/checkpoints/step_*/COMMITTED" | sort | tail -n 1; }
# The speed of the first seconds may not last, so the job is killed after 90 seconds, on a fast machine
# after 500 steps; just after it saved a checkpoint, so that few steps are lost.
saved=""
until now="$(newest)"; [[ "$now" != "$saved" ]] &&
  [[ $((SECONDS - pretrain_started)) -ge 90 || "$now" == *step_00000[5-9]* ]]; do
  saved="$now"
  if ! kill -0 "$job" 2>/dev/null; then
    wait "$job"
  fi
  sleep 0.5
done
trap - EXIT
# The shell would announce the death of its child.
{ kill_job; wait "$job" || true; } 2>/dev/null
# On a slow machine, as many steps as fit into the time at the speed of the last steps.
steps="$(python - "$out/run" $((seconds - (SECONDS - started))) "$full_steps" <<'PYTHON'
import sys
from pathlib import Path

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.observe.metrics import read_metrics

run, left, full = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
train = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"][-4:]
tokens_per_second = sum(r["tokens_per_second"] for r in train) / len(train)
# The start, validations, export and filling of masks take 30 seconds.
steps = max(committed_steps(run)) + (left - 30) * tokens_per_second / (32 * 64)
print(full if steps > 0.9 * full else 4 * round(max(500, steps) / 4))
PYTHON
)"
say "Killed (SIGKILL, every process). Starting it again, to step $steps"
pretrain "$steps" "checkpoint.save_every=$((steps / 4))" --allow-config-change

say "6/7 Exporting to Hugging Face format"
megatron-deberta convert --checkpoint "$out/run" --to hf --output "$out/exported"

say "7/7 Filling one mask in each of 40 held-out sentences"
# After eight minutes a model answers with a frequent word wherever it is not sure; the prior weight
# takes the frequency out of the scores (docs/export.md), with the floor only that of frequent words.
tools/fill_held_out.py --model "$out/exported" --input "$out"/text/validation/part-*.jsonl \
  --prior-weight 1 --prior-floor 0.002 --prior-shards "$out/shards/train_text_document"

say "Result"
python - "$out/run" <<'PYTHON'
import sys
from pathlib import Path

from megatron_deberta.observe.metrics import read_metrics, terminal_loss_curve

run = Path(sys.argv[1])
records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "validation"]
unigram = [r["unigram_loss"] for r in records if "unigram_loss" in r][-1]
loss = [r["loss"] for r in records if "loss" in r][-1]
print(terminal_loss_curve(run / "metrics.jsonl", unigram=unigram))
print(f"validation loss   {loss:.3f} nats per masked token")
print(f"unigram           {unigram:.3f} nats on the same tokens")
print(f"better by         {unigram - loss:.3f} nats (required: 1)")
sys.exit(0 if loss <= unigram - 1 else 1)
PYTHON
cat <<NEXT
time              $((SECONDS - started)) s after installation
curves            $out/run/loss.png; tensorboard --logdir $out/run/tensorboard
model             $out/exported

What next? (source .venv/bin/activate first)
  megatron-deberta fill-mask $out/exported "The [MASK] is not a valid name."
  launch/quickstart.sh --input YOUR_TEXT.jsonl     # the same on your text: JSONL, .txt, Parquet
  megatron-deberta plan configs/runs/base_dgx2.yaml --cluster dgx2    # what a real run costs
NEXT
