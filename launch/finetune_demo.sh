#!/usr/bin/env bash
# Fine-tunes a model on labelled data of your own and prints predictions.
#
#   launch/finetune_demo.sh --data FILE --labels A,B[,C...]   CSV, TSV, JSON Lines or Parquet file
#   launch/finetune_demo.sh --data DIR --task TASK.yaml       a task of your own, as in docs/tasks.md
#
#   --model DIR        model to start from (default: the model that launch/quickstart.sh exports)
#   --text NAME        column of the text (default: text)
#   --label NAME       column of the label (default: label)
#   --split NAME       with --task: split to predict (default: test)
#   --output DIR       new folder for the results (default: runs/finetune_demo)
#   section.key=value  settings of `megatron-deberta finetune`, such as finetune.epochs=10
#
# A single file is divided by a hash of the rows: four fifths to train on, a tenth to choose the best
# checkpoint, and a tenth that is predicted. Starting again with the same --output continues.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
  echo "finetune_demo: error: $*" >&2
  exit 2
}

model="$root/${QUICKSTART_DIR:-runs/quickstart}/exported"
data="" task="" labels="" text=text label=label split="" output="runs/finetune_demo"
settings=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    -h | --help) sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    --model | --data | --task | --labels | --text | --label | --split | --output)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    -*) fail "unknown option $1; --help lists them" ;;
    *=*) settings+=("$1") && shift ;;
    *) fail "got $1, expected an option or section.key=value; see --help" ;;
  esac
done
[[ -n "$data" ]] || fail "--data is missing: a file with --labels, or a folder with --task"
[[ -e "$data" ]] || fail "--data $data does not exist"
[[ -d "$model" ]] || fail "--model $model does not exist; run launch/quickstart.sh, or give a model"
if [[ -z "$task" ]]; then
  [[ -f "$data" ]] || fail "--data $data is a folder; give --task TASK.yaml, or one file"
  [[ -n "$labels" ]] || fail "--labels is missing, such as --labels negative,positive"
fi

say() { printf '\n== %s\n' "$*"; }

[[ -e "$root/.venv" ]] || "$root/launch/setup_venv.sh"
export PATH="$root/.venv/bin:$PATH" DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" HF_HUB_OFFLINE=1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$output"

if [[ -z "$task" ]]; then
  task="$output/task.yaml" split="${split:-predict}"
  # The search spaces of the paper are for larger data.
  settings=(--settings default "${settings[@]}")
  # Values are quoted by JSON, which YAML contains.
  python - "$data" "$labels" "$text" "$label" >"$task" <<'PYTHON'
import json
import sys
from pathlib import Path

file, labels, text, label = sys.argv[1:]
parts = {"train": [0, 0.8], "dev": [0.8, 0.9], "predict": [0.9, 1]}
task = {
    "base": "configs/tasks/custom_classification.yaml",
    "name": "demo",
    "splits": {name: {"files": Path(file).name, "part": part} for name, part in parts.items()},
    "columns": {"text": text, "label": label},
    "labels": labels.split(","),
}
print(json.dumps(task, indent=1))
PYTHON
  data="$(dirname "$data")"
fi
split="${split:-test}"

say "1/3 Fine-tuning"
megatron-deberta finetune "$task" --model "$model" --data "$data" "train.run_dir=$output/run" \
  parallel.engine=plain "${settings[@]}"

say "2/3 Scores on dev"
megatron-deberta evaluate task "$task" --model "$output/run" --data "$data" --split dev

say "3/3 Predictions for the split $split"
megatron-deberta predict "$task" --model "$output/run" --data "$data" --split "$split" \
  --output "$output/predictions.jsonl"
python - "$task" "$data" "$split" "$output/predictions.jsonl" <<'PYTHON'
import json
import sys
from pathlib import Path

from megatron_deberta.tasks import load_task, read_examples

task, data, split, predictions = sys.argv[1:]
examples = read_examples(load_task(task), data, split)
for example, line in list(zip(examples, Path(predictions).read_text().splitlines()))[:20]:
    found = json.loads(line)
    sure = f" {max(found['scores'].values()):.0%}" if "scores" in found else ""
    text = example.text or " ".join(example.words)
    print(f"{found['label']}{sure}: {text[:80]}")
PYTHON
cat <<NEXT

predictions       $output/predictions.jsonl
curves            $output/run/loss.png
model             megatron-deberta convert --checkpoint $output/run --to hf --output $output/hf
NEXT
