"""A tiny labelled task and a tiny model to fine-tune on it."""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).parents[1] / "golden" / "c6955b0" / "hf"
WORDS = "the cat sat on a mat and saw one dog run far from its home in the rain".split()
TASK = """\
name: tiny
head: classification
reader: tsv
splits: {train: train.tsv, dev: dev.tsv, test: test.tsv}
columns: {text: text, label: label}
labels: [bad, good]
metrics: [accuracy]
max_length: 24
"""


def write_task(folder: Path) -> Path:
    """Write ``task.yaml`` and its data; the label says whether the first word is early in WORDS."""
    folder.mkdir()
    for name, size in (("train", 37), ("dev", 11), ("test", 5)):
        lines = ["text\tlabel"]
        for number in range(size):
            first = (number * 7 + size) % len(WORDS)
            text = " ".join(WORDS[first : first + 1 + number % 6] or WORDS[:2])
            lines.append(f"{text}\t{'good' if first < 9 else 'bad'}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "task.yaml").write_text(TASK)
    return folder
