"""The import of DeepSpeed."""

from __future__ import annotations

import pytest
import torch

from megatron_deberta.engine.deepspeed_runtime import import_deepspeed


def test_no_operator_is_probed_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = import_deepspeed(torch.device("cpu")).ops
    monkeypatch.setattr(ops, "_probe_compatible_ops", lambda: pytest.fail("probed"))
    monkeypatch.delitem(vars(ops), "__compatible_ops__")
    import_deepspeed(torch.device("cpu"))
    assert ops.__compatible_ops__ == {"deepspeed_shm_comm": False}
