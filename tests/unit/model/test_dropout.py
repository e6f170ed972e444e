"""Dropout drops the same elements in every execution mode."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.parallelize.build import uses_fusion
from megatron_deberta.model import fused
from megatron_deberta.model.dropout import (
    Dropout,
    DropoutExecution,
    DropoutSeeds,
    site_id,
)
from megatron_deberta.model.embeddings import Perturbation
from megatron_deberta.model.fused import PendingResidual
from megatron_deberta.objectives.sift import Sift
from megatron_deberta.ops import triton as triton_kernels
from megatron_deberta.ops.dropout_bits import keep_mask, keep_scale, mix_seed
from tests.support.compiler import needs_compiler

SEEDS = DropoutSeeds(3, 5, torch.tensor([7, 2**40]))
EXECUTIONS = {
    "saved": DropoutExecution(),
    "recomputed": DropoutExecution(keep_masks=False),
    "compiled": DropoutExecution(fuse=True),
}


def draw(dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """Return input, residual and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def dropped(
    execution: DropoutExecution, dtype: torch.dtype, shape: tuple[int, ...]
) -> list[Tensor]:
    """Output and the gradients of both inputs."""
    x, residual, upstream = draw(dtype, shape)
    for tensor in (x, residual):
        tensor.requires_grad_()
    layer = Dropout(0.1, "site")
    layer.execution = execution
    positions = torch.arange(shape[-2])
    positions = positions.expand(shape[:2]) if len(shape) == 3 else positions
    out = layer(x, positions, SEEDS, residual=residual)
    out.backward(upstream)
    assert x.grad is not None
    assert residual.grad is not None
    return [out.detach(), x.grad, residual.grad]


@pytest.mark.parametrize("shape", [(2, 5, 16), (8, 12)], ids=["rows", "table"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_recomputed_masks_are_the_same(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    one, other = (dropped(EXECUTIONS[name], dtype, shape) for name in ("saved", "recomputed"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.nightly  # Compiling takes up to half a minute.
@needs_compiler
def test_compiled_dropout_drops_the_same_elements() -> None:
    x, residual, _ = draw(torch.float32, (2, 5, 16))
    positions = torch.arange(5).expand(2, 5)
    layer = Dropout(0.1, "site")
    outputs = []
    for name in ("saved", "compiled"):
        layer.execution = EXECUTIONS[name]
        outputs.append(layer(x, positions, SEEDS, residual=residual))
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)


@pytest.mark.nightly
@needs_compiler
def test_gradients_of_compiled_dropout() -> None:
    eager, compiled = (
        dropped(EXECUTIONS[name], torch.float32, (2, 5, 16)) for name in ("saved", "compiled")
    )
    assert torch.equal(eager[1] == 0, compiled[1] == 0)
    torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-6)


GENERATED_CODE = """
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from megatron_deberta.model.dropout import _hash_and_apply

x = torch.ones(2, 5, 16, dtype=torch.bfloat16)
seed, positions = torch.tensor([7, 2**40]), torch.arange(5).expand(2, 5)
function = torch.compile(_hash_and_apply, dynamic=False)
with config.patch(force_disable_caches=True):
    _, (code,) = run_and_get_code(function, x, x, seed, positions, 0.1)
print(code)
"""


@pytest.mark.nightly
@needs_compiler
def test_compiled_dropout_is_one_kernel() -> None:
    """A view of the random words as bytes would be a call between two kernels.

    In a process of its own: compiling depends on what was compiled before.
    """
    command = [sys.executable, "-c", GENERATED_CODE]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    calls = code[code.index("def call(") :]
    assert len(re.findall(r"^ +cpp_fused\w*\(", calls, re.MULTILINE)) == 1, calls
    assert not re.search(r"extern_kernels\.|torch\.ops\.|aten\.", calls), calls


def test_dropout_matches_its_definition() -> None:
    layer = Dropout(0.1, "site")
    x, residual = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    positions = torch.arange(5).expand(2, 5)
    keep = keep_mask(SEEDS.per_row(layer.site), positions, 16, 0.1)[:, 0]
    expected = residual + x * keep * keep_scale(0.1)
    torch.testing.assert_close(layer(x, positions, SEEDS, residual=residual), expected)
    assert 0 < int((~keep).sum()) < 60
    assert torch.equal(layer(x, positions, None, residual=residual), residual + x)
    assert layer(x, positions, None) is x


def test_saved_tensors() -> None:
    sizes = {}
    for name in ("saved", "recomputed"):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            layer = Dropout(0.1, "site")
            layer.execution = EXECUTIONS[name]
            positions = torch.arange(64).expand(2, 64)
            # The CPU kernel, which saves no mask, has no float64.
            x = torch.randn(2, 64, 256, dtype=torch.float64, requires_grad=True)
            layer(x, positions, SEEDS)
        sizes[name] = sum(t.numel() * t.element_size() for t in saved)
    assert sizes["saved"] == 2 * 64 * 256
    assert sizes["recomputed"] <= 2 * 64 * 8 + 16


KEYS_OF_ROWS = {
    "run_seed": 4,
    "step": 6,
    "decoder_pass": 1,
    "samples": torch.tensor([8, 2**40 + 1]),
}


@pytest.mark.parametrize("key", [*KEYS_OF_ROWS, "site"])
@pytest.mark.parametrize("shape", [(2, 32, 16), (32, 16)], ids=["rows", "table"])
def test_dropped_elements_depend_on_every_key(shape: tuple[int, ...], key: str) -> None:
    """A table is shared by samples and by passes of the mask decoder, and by nothing else."""

    def dropped_by(site: str, seeds: DropoutSeeds) -> Tensor:
        positions = torch.arange(32) if len(shape) == 2 else torch.arange(32).expand(2, 32)
        return Dropout(0.5, site)(torch.ones(shape), positions, seeds) == 0

    first = dropped_by("site", SEEDS)
    if key == "site":
        other = dropped_by("other", SEEDS)
    else:
        other = dropped_by("site", replace(SEEDS, **{key: KEYS_OF_ROWS[key]}))  # type: ignore[arg-type]
    if len(shape) == 2 and key in ("samples", "decoder_pass"):
        assert torch.equal(first, other)
        return
    # Independent masks differ in half of the elements, in every row of the batch.
    for a, b in zip(first.view(-1, 512), other.view(-1, 512), strict=True):
        assert 156 < int((a != b).sum()) < 356


def test_the_passes_of_sift_have_dropout_bits_of_their_own() -> None:
    """The clean pass, that of the random perturbation, and that of the final one."""
    used: list[DropoutSeeds] = []
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    tokens: Any = SimpleNamespace(positions=torch.arange(3).expand(2, 3))

    def logits_of(seeds: DropoutSeeds | None, perturbation: Perturbation | None) -> Tensor:
        assert seeds is not None
        assert perturbation is not None
        used.append(seeds)
        return perturbation(hidden, tokens).sum(1)

    sift = Sift(0.1, 0.1, "kl", clean_gradient=False)
    scored = torch.ones(2, dtype=torch.bool)
    sift(logits_of, lambda out: [out], hidden.sum(1), scored, SEEDS, squared_error=False)
    first, second = used
    site = site_id("encoder.layers.0.ffn")
    masks = [
        keep_mask(seeds.per_row(site), torch.arange(3), 512, 0.5)
        for seeds in (SEEDS, first, second)
    ]
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < float((one != other).float().mean()) < 0.6


def test_seeds_are_hashes_of_all_keys() -> None:
    """The formula is part of the format: a resumed run drops what the first would have."""
    expected = [int(mix_seed(3, 5, 9, 1, sample)) for sample in (7, 2**40)]
    assert SEEDS.at_pass(1).per_row(9).tolist() == expected
    assert SEEDS.shared(9).tolist() == [int(mix_seed(3, 5, 9, 0))]


def test_fused_dropout_depends_on_its_site() -> None:
    x, positions = torch.ones(2, 5, 16), torch.arange(5).expand(2, 5)
    for site in ("one", "other"):
        layer = Dropout(0.1, site)
        layer.execution = EXECUTIONS["compiled"]
        pending = layer.before_norm(x, positions, SEEDS, x)
        assert isinstance(pending, PendingResidual)
        assert torch.equal(pending.seed, SEEDS.per_row(site_id(site)))


def test_seeds_of_all_sites_at_once_are_those_of_each() -> None:
    sites = tuple(map(site_id, ("a", "b", "c")))
    for step in (5, torch.tensor(5)):
        seeds = replace(SEEDS, step=step)
        together = seeds.of_sites(sites, 2)
        for site in sites:
            assert torch.equal(together.shared(site), SEEDS.shared(site))
            for decoder_pass in range(3):
                found = together.at_pass(decoder_pass)
                assert (site, decoder_pass) in found.rows
                assert torch.equal(found.per_row(site), SEEDS.at_pass(decoder_pass).per_row(site))
    other = site_id("d")
    assert torch.equal(together.per_row(other), SEEDS.per_row(other))
    # Other keys have other seeds.
    assert not replace(together, run_seed=4).rows


def test_each_set_of_shapes_has_compilations_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would stop compiling a function after eight of them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(fused, "MAX_COMPILED", 12)
    fused._compiled.cache_clear()
    fused._numbers.clear()
    layer = Dropout(0.1, "site")
    layer.execution = EXECUTIONS["compiled"]
    with torch._dynamo.config.patch(error_on_recompile=True):  # type: ignore[attr-defined]
        for length in range(4, 14):
            x, positions = torch.ones(2, length, 8), torch.arange(length)
            for _ in range(2):
                found = layer(x, positions.expand(2, length), SEEDS)
            expected = x * keep_mask(SEEDS.per_row(layer.site), positions, 8, 0.1)[:, 0]
            assert torch.equal(found, expected * keep_scale(0.1))
            layer(x, positions.expand(2, length), SEEDS, residual=x)
    assert fused._compiled.cache_info().currsize == 20
    fused._compiled.cache_clear()


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [("cpu", (9, 0), False), ("cuda", (7, 0), False), ("cuda", (8, 0), True)],
)
def test_fusion_on_its_own_needs_a_gpu_that_triton_supports(
    device: str, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton_kernels, "TRITON_INSTALLED", True)
    config = RunConfig()
    assert uses_fusion(config, torch.device(device)) == expected
    monkeypatch.setattr(triton_kernels, "TRITON_INSTALLED", False)
    assert not uses_fusion(config, torch.device(device))
    for fuse in (True, False):
        chosen = replace(config, parallel=replace(config.parallel, fuse=fuse))
        assert uses_fusion(chosen, torch.device(device)) == fuse
