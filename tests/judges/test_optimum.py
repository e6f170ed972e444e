"""optimum opens exported folders and computes what transformers computes from the original.

optimum-onnx requires a transformers before 4.58, so both run in a process with these packages.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parity.test_published_onnx import convert, write_published
from tests.support.judges import package_folder, record, run_program, version

PACKAGES = (
    "optimum-onnx==0.1.0", "optimum==2.1.0", "transformers==4.57.6", "huggingface-hub==0.36.2",
    "tokenizers==0.22.2",
)  # fmt: skip
CLASSES = {
    "single label": "SequenceClassification",
    "tokens": "TokenClassification",
    "spans": "QuestionAnswering",
    "masked language model": "MaskedLM",
    "choices": "MultipleChoice",
    "encoder": "FeatureExtraction",
}
PROGRAM = """
import json, sys
import optimum.onnxruntime, torch, transformers

worst = 0.0
for kind, folder in json.loads(sys.argv[1]).items():
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder + "/onnx")
    rows = tokenizer(["The quick brown fox.", "A model"], padding=True, return_tensors="pt")
    mask = rows["attention_mask"].bool()
    if kind == "MultipleChoice":
        rows = {name: value[None] for name, value in rows.items()}
    auto = "AutoModel" if kind == "FeatureExtraction" else "AutoModelFor" + kind
    model = getattr(optimum.onnxruntime, "ORTModelFor" + kind).from_pretrained(folder + "/onnx")
    stock = getattr(transformers, auto).from_pretrained(folder + "/published").eval()
    with torch.no_grad():
        found, expected = model(**rows), stock(**rows)
    names = [name for name in expected if name in found and name != "hidden_states"]
    assert names, kind
    for name in names:
        ours, theirs = found[name], expected[name]
        if ours.shape[:2] == mask.shape:
            ours, theirs = ours[mask], theirs[mask]
        worst = max(worst, (ours - theirs).abs().max().item())
print(json.dumps(worst))
"""


@pytest.mark.nightly
def test_optimum_opens_exports(tmp_path: Path) -> None:
    folders = {}
    for head, kind in CLASSES.items():
        folder = tmp_path / kind
        write_published(folder / "published", "DebertaV2", head)
        convert(folder / "published", folder / "onnx")
        folders[kind] = str(folder)
    packages = package_folder(*PACKAGES)
    worst = run_program(packages, PROGRAM, json.dumps(folders))
    assert worst < 1e-5
    record(
        "optimum-onnx", version(packages, "optimum-onnx"),
        "ORTModel classes on exported folders against transformers' classes on the original",
        f"{worst:.1e}", "1e-5", len(CLASSES),
    )  # fmt: skip
