"""A few minimal pairs in BLiMP's format, and a slow restatement of pseudo-log-likelihoods."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_deberta.model import DebertaForPretraining
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.tokenizer import Tokenizer

PAIRS = (
    ("The cats sleep near the river.", "The cats sleeps near the river.", "agreement", "syntax"),
    ("A boy has seen himself.", "A boy has seen herself.", "anaphor", "morphology"),
    ("Rivers run.", "Rivers runs.", "agreement", "syntax"),
    ("Nobody has ever seen it.", "Somebody has ever seen it.", "npi", "syntax/semantics"),
    ("Which boy did she see?", "Which boy did she see him?", "islands", "syntax_semantics"),
    ("Those boys left.", "Those boys left.", "anaphor", "morphology"),
)
"""Acceptable and unacceptable sentence, paradigm, field; the last pair is a tie."""


def write_pairs(folder: Path) -> Path:
    """Write the pairs as BLiMP's files are; return the folder."""
    names = ("sentence_good", "sentence_bad", "UID", "field")
    lines = [json.dumps(dict(zip(names, pair, strict=True))) for pair in PAIRS]
    folder.mkdir(exist_ok=True)
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@torch.no_grad()
def slow_score(model: DebertaForPretraining, tokenizer: Tokenizer, text: str, metric: str) -> float:
    """Return the pseudo-log-likelihood of a sentence, one forward pass per token."""
    ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    starts = tokenizer.word_starts()
    total = 0.0
    for place in range(1, len(ids) - 1):
        masked = list(ids)
        masked[place] = tokenizer.mask_id
        later = place + 1
        while metric == "within_word_l2r" and later < len(ids) - 1 and not starts[ids[later]]:
            masked[later] = tokenizer.mask_id
            later += 1
        logits = model.logits(ModelInputs(torch.tensor([masked])))[0, place]
        total += float(logits.log_softmax(-1)[ids[place]])
    return total
