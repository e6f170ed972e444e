"""DeepSpeed is what ``deepspeed_patches.py`` was written for."""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
from types import FunctionType
from typing import Any

import pytest
import torch

from megatron_deberta.engine.deepspeed_patches import import_deepspeed

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_STAGE_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
SOURCES = {
    "import_deepspeed": {"deepspeed.ops:__getattr__": "b6327fe22a4b"},
    "_import_muon": {"deepspeed.runtime.zero.muon.muon_optimizer": "8e0c2db739f8"},
    "_fp16_on_cpu": {f"{_ENGINE}._do_sanity_check": "adf8ba953177"},
    "overlapped_reduction": {f"{_ENGINE}._do_optimizer_sanity_check": "fd92e39132a6"},
    "add_gradients_directly": {
        f"{_BF16}._update_hp_grad": "026f6bb3edea",
        f"{_STAGE_2}._fill_param_grad_accum_attribute": "b6548a1b1448",
    },
    "leaner_step": {
        "deepspeed.runtime.utils:is_invalid_grad_norm": "6afd483e2c88",
        "deepspeed.runtime.utils:get_global_norm_of_tensors": "2345c9e02fea",
        "deepspeed.runtime.utils:clip_tensors_by_global_norm": "7acb1d957631",
        f"{_BF16}.step": "9b21d4a28f87",
        f"{_STAGE_2}.check_overflow": "623c2e9b3e44",
        f"{_STAGE_2}.get_grad_norm_direct": "72af0993ad8c",
        f"{_STAGE_2}.unscale_and_clip_grads": "6bf2ce6f97ea",
        f"{_STAGE_3}.check_overflow": "623c2e9b3e44",
        f"{_STAGE_3}.get_grad_norm_direct": "5ba2252d5f16",
        f"{_STAGE_3}.unscale_and_clip_grads": "3f0d9e8e7861",
    },
    "ExternalLossScaler": {f"{_STAGE_2}.step": "9520884fd916", f"{_STAGE_3}.step": "c751b3209f83"},
    "DeepSpeedZeroEngine.backward": {
        f"{_ENGINE}._backward_prologue": "373ee3732451",
        f"{_ENGINE}._backward_epilogue": "5d52976af041",
        f"{_ENGINE}.backward": "b8c4368bee04",
    },
    "DeepSpeedZeroEngine.local_shards": {
        f"{_STAGE_3}._get_fp32_opt_state_partition": "17cbde2bfa7a",
    },
}
"""Beginning of the SHA-256 of the functions that each patch replaces or relies on."""


def source(function: Any) -> str:
    """Return the source of a function or module, behind DeepSpeed's decorators."""
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            if isinstance(cell.cell_contents, FunctionType):
                return source(cell.cell_contents)
    return inspect.getsource(function)


@pytest.mark.parametrize("patch", SOURCES)
def test_what_is_patched_has_not_changed(patch: str) -> None:
    import_deepspeed(torch.device("cpu"))
    for name, expected in SOURCES[patch].items():
        found = hashlib.sha256(source(pkgutil.resolve_name(name)).encode()).hexdigest()[:12]
        assert found == expected, (
            f"DeepSpeed has changed {name}: is {patch} still right, and needed? Then set {found!r}"
        )


def test_no_operator_is_probed_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = import_deepspeed(torch.device("cpu")).ops
    monkeypatch.setattr(ops, "_probe_compatible_ops", lambda: pytest.fail("probed"))
    monkeypatch.delitem(vars(ops), "__compatible_ops__")
    import_deepspeed(torch.device("cpu"))
    assert ops.__compatible_ops__ == {"deepspeed_shm_comm": False}
