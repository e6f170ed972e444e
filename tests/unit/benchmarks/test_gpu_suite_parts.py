import argparse
import json

import pytest

from benchmarks.gpu import suite as gpu_suite
from benchmarks.gpu.one_step import part_of
from benchmarks.gpu.record import result_path
from benchmarks.gpu.step import wrong_losses
from benchmarks.lib.provenance import ROOT


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(
        out=tmp_path, work=tmp_path, device="cpu", small=True, minutes=1, force=False, corpus=None
    )


def put(args, part, items, left=()):
    path = result_path(gpu_suite.options_of(args, part))
    path.write_text(json.dumps({"items": items, "left": list(left), "hardware": "a chip"}))


@pytest.mark.parametrize(
    ("item", "left", "end", "code"),
    [
        ({"off": {"loss": 1e-9}, "wrong": []}, [], None, 0),
        ({"off": {"loss": 1e-9}, "wrong": []}, ["another"], None, 75),
        ({"off": {"loss": 1.0}, "wrong": ["loss off by 1"]}, ["another"], None, 1),
        ({"error": "RuntimeError: no\nlines"}, [], None, 1),
        ({"off": {"loss": 1e-9}, "wrong": []}, [], "took too long", 1),
    ],
    ids=["done", "out of time", "wrong", "error", "killed"],
)
def test_exit_code(args, capsys, item, left, end, code):
    put(args, "parity", {"steps fp32": item}, left)
    assert gpu_suite.report(["parity"], args, {"parity": end}) == code
    said = capsys.readouterr().out
    assert "parity on a chip" in said
    for word in [*item.get("wrong", []), *left[:0], end or "", item.get("error", "")[:16]]:
        assert word in said


@pytest.mark.parametrize(
    ("total", "minutes"),
    [(28, [6, 6, 6]), (15, [6, 5]), (11, [6, 1]), (3.5, [1.5]), (2.5, [])],
)
def test_parts_end_within_the_time_of_all(args, capsys, monkeypatch, total, minutes):
    """Each takes its time and two minutes of grace."""
    parts = ["step", "attention", "peers"]
    args.part, args.minutes, args.total_minutes = parts, 6.0, total
    now, given = [0.0], []

    def run_part(_, options):
        given.append(options.minutes)
        now[0] += 60 * (options.minutes + (2 if options.minutes > 5 else 1))

    monkeypatch.setattr(gpu_suite, "run_part", run_part)
    monkeypatch.setattr(gpu_suite.time, "monotonic", lambda: now[0])
    errors = gpu_suite.run_parts(args)
    assert given == minutes
    assert list(errors) == parts[: len(minutes)]
    assert now[0] <= 60 * total
    code = gpu_suite.report(parts, args, errors)
    assert code == (75 if len(minutes) < 3 else 0)
    assert capsys.readouterr().out.count("for lack of time") == 3 - len(minutes)


def test_part_without_results_is_wrong(args, capsys):
    assert gpu_suite.report(["train"], args, {"train": "the process ended with -9"}) == 1
    assert "ended with -9" in capsys.readouterr().out


def test_missing_package_stops_the_suite(capsys, monkeypatch, tmp_path):
    found = gpu_suite.version
    monkeypatch.setattr(gpu_suite, "version", lambda n: None if n == "orjson" else found(n))
    monkeypatch.setattr("sys.argv", ["suite", "--device", "cpu", "--out", str(tmp_path / "out")])
    assert gpu_suite.main() == 2
    assert "not installed: orjson; install requirements.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_environment_keeps_the_folders_of_pythonpath(args, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/packages")
    options = gpu_suite.options_of(args, "learn")
    assert gpu_suite.environment(args, options)["PYTHONPATH"] == f"{ROOT}:/packages"


def test_losses_of_a_step_are_checked():
    found = {"vocabulary": 1000, "losses": [6.9, 6.8, 6.7]}
    assert wrong_losses(found) == []
    assert "far from" in wrong_losses({**found, "losses": [12.0, 6.0]})[0]
    assert "not fall" in wrong_losses({**found, "losses": [6.9, 6.9, 7.0]})[0]
    assert "not finite" in wrong_losses({**found, "losses": [6.9, float("nan")]})[0]


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matrix products"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("vectorized_layer_norm_kernel", "normalisation"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("vectorized_elementwise_kernel", "elementwise and rest"),
    ],
)
def test_part_of_kernel(kernel, part):
    assert part_of(kernel) == part


def test_part_of_our_kernels():
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from megatron_deberta.ops.triton import gelu, tables

    assert part_of(gelu.bias_gelu_backward_kernel.fn.__name__) == "elementwise and rest"
    assert part_of(tables.table_gradient_kernel.fn.__name__) == "attention"
