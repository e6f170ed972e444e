"""Settings every test shares: no GPU detour, few threads, Triton's interpreter."""

import os

# Before torch or DeepSpeed is imported anywhere.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

# Before Triton is imported anywhere: without a GPU the fused kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
