"""Use disentangled attention in a model of your own.

Usage: python examples/attention_operator.py
"""

import torch
from torch import Tensor, nn

from megatron_deberta import RelativePositions, disentangled_attention


class SelfAttention(nn.Module):
    """Multi-head self-attention with relative positions (He et al. 2021, section 3.1)."""

    def __init__(self, hidden_size: int, num_heads: int, positions: RelativePositions) -> None:
        super().__init__()
        self.num_heads, self.positions = num_heads, positions
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.position_table = nn.Parameter(0.02 * torch.randn(2 * positions.span, hidden_size))
        self.position_key = nn.Linear(hidden_size, hidden_size)
        self.position_query = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map [batch, tokens, hidden] to the same shape; attention_mask is True for tokens."""
        query, key, value = (self.split_heads(x) for x in self.qkv(hidden).chunk(3, dim=-1))
        attended = disentangled_attention(
            query,
            key,
            value,
            self.split_heads(self.position_key(self.position_table)),
            self.split_heads(self.position_query(self.position_table)),
            self.positions,
            attention_mask=attention_mask,
        )
        return attended.transpose(1, 2).flatten(2)

    def split_heads(self, x: Tensor) -> Tensor:
        """[..., tokens, heads * size] -> [..., heads, tokens, size]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)


torch.manual_seed(0)
attention = SelfAttention(
    64, num_heads=4, positions=RelativePositions(max_distance=128, buckets=32)
)
hidden = torch.randn(2, 100, 64)
padding = torch.arange(100) < torch.tensor([[100], [70]])
output = attention(hidden, padding)
output.sum().backward()
print(f"output {list(output.shape)}, {sum(p.numel() for p in attention.parameters()):,} parameters")
