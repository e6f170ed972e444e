"""Pretrain DeBERTa at scale: tensor-parallel disentangled attention on a DeepSpeed ZeRO engine."""

__version__ = "0.1.0"
