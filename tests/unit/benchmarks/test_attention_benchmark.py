import sys

import pytest
import torch

from benchmarks.attention import operator as attention
from benchmarks.attention import variants as attention_variants
from benchmarks.attention.operator import Comparison, errors, expected_tensors, flops, table
from benchmarks.attention.variants import CPU_VARIANTS, EAGER, FLOOR, GPU_VARIANTS, Case, Variant

CASE = Case(2, 2, 40)
PADDED = Case(2, 2, 40, 0.1, padding=True)


def test_flops_follow_the_published_formula():
    # 40 tokens have 79 distances, each with its own slot: 4 L^2 D + 4 L R D per row and head.
    rows_and_heads = 2 * 2
    assert flops(CASE) == (
        rows_and_heads * (4 * 40 * 40 * 64 + 4 * 40 * 79 * 64),
        rows_and_heads * (10 * 40 * 40 * 64 + 12 * 40 * 79 * 64),
    )
    long = Case(1, 1, 4096)
    # Log buckets: all 512 slots except the one that no distance below 512 x log base uses.
    assert flops(long)[0] == pytest.approx(4 * 4096 * 64 * (4096 + 512), rel=1e-3)


@pytest.mark.parametrize("case", [CASE, Case(2, 2, 40, padding=True)], ids=lambda c: c.name)
@pytest.mark.parametrize("name", [EAGER, "SDPA with bias", "chunked"])
def test_variants_agree(case, name):
    found = errors(CPU_VARIANTS[name], case, expected_tensors(case, 1))
    assert max(found.values()) < 1e-5


def test_masked_queries_are_timed():
    at = attention.masked_positions(CASE)
    assert at.shape == (2, 6)
    assert (at.diff() > 0).all()
    assert at.max() < CASE.length
    assert at.min() >= 0
    dropped = Comparison(Case(2, 2, 40, 0.1), {"native": CPU_VARIANTS["native"]})
    times = dropped.gathered(least=1, most=1)["native_gathered_ms"]
    assert min(times["gathered"], times["all"]) > 0
    assert Comparison(CASE, {"native": CPU_VARIANTS["native"]}).gathered() == {}


def test_dropout_is_compared_only_where_it_is_exact():
    comparison = Comparison(PADDED, CPU_VARIANTS)
    comparison.check()
    assert max(comparison.report["chunked"]["errors"].values()) < 1e-5
    assert comparison.report[EAGER] == {}
    assert comparison.report[FLOOR] == {"not run": "torch's fused kernel has no dropout on the CPU"}
    assert comparison.result()["wrong"] == []


def test_wrong_result_is_reported():
    def off(case, *x):
        return CPU_VARIANTS["chunked"](case, *x) * 1.001

    comparison = Comparison(CASE, {"chunked": Variant(off)})
    comparison.check()
    (line,) = comparison.result()["wrong"]
    assert line.startswith("chunked: error of output: 1.0e-03")


def test_16_bit_errors_are_at_most_those_of_eager():
    comparison = Comparison(Case(2, 2, 40, dtype="bf16"), {})
    tensors = attention.TENSORS
    comparison.report = {
        EAGER: {"errors": dict.fromkeys(tensors, 3e-3)},
        "chunked": {"errors": {**dict.fromkeys(tensors, 2e-3), "v": 4e-3}},
    }
    comparison._compare_with_eager()
    assert comparison.result()["wrong"] == ["chunked: error of v: 4.0e-03, of eager: 3.0e-03"]


def test_missing_dropout_is_reported():
    def forgets(case, *x):
        return CPU_VARIANTS["chunked"](CASE, *x)

    comparison = Comparison(Case(2, 2, 40, 0.1), {"peer": Variant(forgets)})
    comparison.check()
    assert "not dropped" in comparison.report["peer"]["wrong"]


def test_failing_peer_is_reported_and_skipped():
    def fails(case, *x):
        raise RuntimeError("no kernel for this size\nand more")

    def grows(case, *x):
        raise torch.OutOfMemoryError("tried to allocate 4 TiB")

    started = []
    comparison = Comparison(
        CASE,
        {"peer": Variant(fails), "huge": Variant(grows), "chunked": CPU_VARIANTS["chunked"]},
        starting=started.append,
        known_failures={"huge": "crashed before"},
    )
    comparison.check()
    comparison.time(least=1, most=1)
    result = comparison.result()
    assert result["variants"]["peer"] == {"not run": "RuntimeError: no kernel for this size"}
    assert result["variants"]["huge"] == {"not run": "crashed before"}
    assert result["variants"]["chunked"]["milliseconds"]["both"] > 0
    assert result["wrong"] == []
    assert "huge" not in started
    assert any("no kernel for this size" in line for line in table(result))


def test_refusals_of_variants_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name, variant in GPU_VARIANTS.items():
        reason = variant.refusal(Case(2, 2, 40, 0.1))
        assert (reason is None) == (name in ("chunked", EAGER)), name
        assert reason is None or len(reason) > 10


def test_flashdeberta_operators_import_without_its_models(tmp_path, monkeypatch):
    operators = tmp_path / "flashdeberta" / "ops"
    operators.mkdir(parents=True)
    (operators.parent / "__init__.py").write_text("raise ImportError('a name has moved')\n")
    (operators / "__init__.py").write_text("")
    for name, ending in (("flash_attention", ""), ("flash_attention_varlen", "_varlen")):
        function = f"flash_attention_with_disentangled{ending}"
        (operators / f"{name}.py").write_text(f"def {function}(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        padded, packed = attention_variants._flash_deberta()
        assert (padded.__name__[-12:], packed.__name__[-6:]) == ("disentangled", "varlen")
        assert attention_variants.FlashDeberta().refusal(CASE) == "needs a CUDA device"
    finally:
        attention_variants._flash_deberta.cache_clear()
        for name in [name for name in sys.modules if name.startswith("flashdeberta")]:
            del sys.modules[name]
