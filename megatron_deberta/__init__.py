"""DeBERTa pretraining with tensor parallelism and DeepSpeed ZeRO.

The names of ``__all__`` are imported on first access, so that the command line starts quickly.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_deberta.config import load_config
    from megatron_deberta.config.schema import ModelConfig as DebertaConfig
    from megatron_deberta.model import DebertaForMaskedLM, DebertaModel
    from megatron_deberta.ops import RelativePositions, disentangled_attention
    from megatron_deberta.rank_process import pretrain

__version__ = "0.1.0"
__all__ = [
    "DebertaConfig",
    "DebertaForMaskedLM",
    "DebertaModel",
    "RelativePositions",
    "disentangled_attention",
    "load_config",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name == "DebertaConfig":
        from megatron_deberta.config.schema import ModelConfig

        return ModelConfig
    if name == "load_config":
        from megatron_deberta.config import load_config

        return load_config
    if name == "pretrain":
        from megatron_deberta.rank_process import pretrain

        return pretrain
    if name in ("DebertaForMaskedLM", "DebertaModel"):
        from megatron_deberta import model

        return getattr(model, name)
    if name in ("RelativePositions", "disentangled_attention"):
        from megatron_deberta import ops

        return getattr(ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
