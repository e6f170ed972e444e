"""Operators dispatched by a layer: nothing that one call per micro batch can do for all layers."""

from __future__ import annotations

import json

import pytest

from benchmarks.lib.provenance import ROOT
from benchmarks.step.operators import MODELS, measure

# Of the hash of dropout seeds, and of the ranges of visible keys
ONCE = ("bitwise_xor", "__rshift__", "__xor__", "searchsorted", "argmax", "arange")
RESULT = ROOT / "benchmarks" / "results" / "offline" / "operators.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeBERTa-base", pytest.param("1.5B", marks=pytest.mark.nightly)])
def test_operators_are_half_of_those_before(name: str) -> None:
    record = json.loads(RESULT.read_text())
    found = measure(MODELS[name])
    for side, operators in found["operators"].items():
        assert not [one for one in operators if any(part in one for part in ONCE)], side
    before = record["before"]["models"][name]
    for key in ("by_layer", "micro_batch"):
        assert 2 * sum(found[key].values()) <= sum(before[key].values())
