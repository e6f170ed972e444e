"""Train a small DeBERTa masked language model in a plain PyTorch loop.

Usage: python examples/train_in_forty_lines.py [STEPS]
"""

import sys

import torch

from megatron_deberta import DebertaConfig, DebertaForMaskedLM

TEXT = "the quick brown fox jumps over the lazy dog while the cat sleeps on the warm mat. " * 50
MASK, LENGTH, BATCH = 0, 64, 8

torch.manual_seed(1)
tokens = torch.tensor(list(TEXT.encode()))
config = DebertaConfig(
    vocab_size=256,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    ffn_hidden_size=128,
    max_position_embeddings=LENGTH,
    max_relative_positions=LENGTH,
    position_buckets=16,
)
model = DebertaForMaskedLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 120
for step in range(1, steps + 1):
    starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
    targets = tokens[starts + torch.arange(LENGTH)]
    masked = torch.rand(targets.shape) < 0.15
    loss = model(targets.masked_fill(masked, MASK), labels=targets.masked_fill(~masked, -100)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, steps) or step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
