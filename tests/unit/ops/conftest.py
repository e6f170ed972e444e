"""Without a GPU, the fused kernels run in Triton's interpreter."""

import os

import torch

# Read when the kernels are imported, which no test does before it needs them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
