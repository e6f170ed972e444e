"""Load the newest checkpoint of a run and predict the masked tokens of a text.

Usage: python examples/fill_mask_from_run.py RUN_FOLDER "Paris is in [MASK]." [TOKENIZER]

TOKENIZER is needed only if the run's tokenizer was moved.
"""

import sys
from pathlib import Path

import torch

from megatron_deberta.hf.loading import build_model, open_trained_model
from megatron_deberta.model import ModelInputs

run = open_trained_model(Path(sys.argv[1]), *sys.argv[3:])
model = build_model(*run.open())
tokenizer = run.tokenizer

ids = tokenizer.encode(sys.argv[2], parse_special=True)
ids = torch.tensor([[tokenizer.cls_id, *ids, tokenizer.sep_id]])
with torch.no_grad():
    probabilities = model.logits(ModelInputs(ids)).softmax(-1)
for position in (ids[0] == tokenizer.mask_id).nonzero().flatten().tolist():
    best = probabilities[0, position].topk(5)
    for token, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        print(f"position {position}: {tokenizer.piece(token)!r:15} {probability:.3f}")
