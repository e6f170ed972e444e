"""The plan's arithmetic, its search and its refusals."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planning import paper as plan_paper
from megatron_deberta.cli.main import main
from megatron_deberta.cluster.profile import load_profile
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.config.schema import Phase
from megatron_deberta.errors import EXIT_USAGE, ConfigError
from megatron_deberta.planning.machine import find_device, machine_of
from megatron_deberta.planning.memory import estimate_memory
from megatron_deberta.planning.plan import (
    LIBRARY_BYTES,
    NEAR,
    LostTime,
    make_cpu_plan,
    make_plan,
    predict_rank_bytes,
    rank_memory,
    search_layouts,
)
from megatron_deberta.planning.step import Traffic, run_seconds, step_time
from tests.support.tiny_task import MODEL, write_task

RUNS = Path(__file__).parents[3] / "configs/runs"
DGX2 = machine_of(load_profile("dgx2"))


@pytest.fixture(scope="module")
def large() -> RunConfig:
    return load_config(RUNS / "1.5b_dgx2.yaml")


def test_a_ring_sends_all_but_its_own_part() -> None:
    reduced = Traffic(kind="all-reduce", group="data", purpose="x", calls=1, num_bytes=800)
    assert reduced.wire_bytes(4) == 2 * 600
    assert reduced._replace(kind="all-gather").wire_bytes(4) == 600
    assert reduced.wire_bytes(1) == 0


def test_compute_is_work_over_rate(large: RunConfig) -> None:
    plan = make_plan(large, DGX2, 256, search=False)
    flops = plan.micro_batch_flops
    assert plan.step.compute == pytest.approx(flops.training / (0.30 * 125e12))
    assert plan.seconds == pytest.approx(1_000_000 * plan.step.total)
    assert plan.batch.accumulation_steps == 1
    # All ranks together do the model's work, and the padding of the vocabulary.
    assert 256 * flops.training == pytest.approx(
        plan.flops_per_token * plan.batch.tokens_per_step, rel=0.01
    )
    slower = machine_of(load_profile("dgx2"), achieved=0.15)
    assert step_time(large, slower, 256).compute == pytest.approx(2 * plan.step.compute)


def test_attention_without_kernels_is_bound_by_memory(large: RunConfig) -> None:
    """Every operation at the data sheet's rates takes 2,271 ms per 8,192 tokens on a V100."""
    plan = make_plan(large, DGX2, 256, search=False)
    scores = 48 * 8 * 24 * 512**2
    assert plan.step.attention == pytest.approx(248 * scores / 900e9)
    assert 2_000 < plan.tokens_per_second / 256 < 8192 / 2.271
    # Recomputation runs the forward pass again, and a rank of two has half of the heads.
    full = replace(large, parallel=replace(large.parallel, recompute="full"))
    assert step_time(full, DGX2, 256).attention == pytest.approx(4 / 3 * plan.step.attention)
    split = replace(large, parallel=replace(large.parallel, tensor_parallel_size=2))
    assert step_time(split, DGX2, 256).attention == pytest.approx(plan.step.attention / 2)
    # A measured share is one of whole steps, and fused kernels do not write scores.
    assert step_time(large, machine_of(load_profile("dgx2"), achieved=0.2), 256).attention == 0
    h100 = machine_of(load_profile("dgx_h100"))
    assert step_time(large, h100, 256).attention == 0
    # A run may choose the backend without fused kernels anywhere.
    chunked = replace(large, parallel=replace(large.parallel, attention_backend="chunked"))
    assert step_time(chunked, h100, 256).attention == pytest.approx(248 * scores / 3350e9)
    measured = machine_of(load_profile("dgx_h100"), achieved=0.2)
    assert step_time(chunked, measured, 256).attention == 0
    assumed = make_plan(chunked, h100, 256, search=False).assumptions
    assert any("248 bytes per score" in text for text in assumed)
    efficient = replace(large, parallel=replace(large.parallel, attention_backend="efficient"))
    assert step_time(efficient, DGX2, 256).attention == pytest.approx(105 * scores / 900e9)
    assert make_plan(efficient, DGX2, 256, search=False).tokens_per_second > plan.tokens_per_second
    assert rank_memory(chunked, DGX2, 256) == rank_memory(large, DGX2, 256)
    assert rank_memory(chunked, h100, 256) == rank_memory(chunked, DGX2, 256)


def test_gradients_cross_nodes_only_where_there_are_several(large: RunConfig) -> None:
    split = replace(large, parallel=replace(large.parallel, tensor_parallel_size=2))
    volumes = {size: make_plan(split, DGX2, size, search=False).volumes for size in (16, 256)}
    assert all(volume.network_bytes == 0 for volume in volumes[16])
    for volume in volumes[256]:
        inside = volume.traffic.group == "tensor"
        assert (volume.network_bytes == 0) is inside
        # Two rings pass through each node, one a rank of a layer.
        assert inside or volume.network_bytes == pytest.approx(2 * volume.nvlink_bytes)


# More than the run's million where a copy of a config has fewer steps.
@pytest.mark.parametrize("short_steps", [900_000, 2_000_000])
def test_shorter_rows_take_less_time(large: RunConfig, short_steps: int) -> None:
    data = replace(large.data, short_steps=short_steps, short_sequence_length=128)
    rows = replace(large.data, sequence_length=128)
    steps = min(short_steps, 1_000_000)
    expected = steps * step_time(replace(large, data=rows), DGX2, 256).total
    expected += (1_000_000 - steps) * step_time(large, DGX2, 256).total
    found = run_seconds(replace(large, data=data), DGX2, 256)
    assert found == pytest.approx(expected)
    assert found < 0.4 * run_seconds(large, DGX2, 256)


def test_phases_are_timed_one_by_one(large: RunConfig) -> None:
    half = large.train.steps // 2
    short = Phase(steps=half, overrides=(("data.sequence_length", 128),))
    phases = (short, Phase(steps=half))
    phased = replace(large, train=replace(large.train, phases=phases))
    plan = make_plan(phased, DGX2, 256, search=True)
    short, full = plan.phase_seconds.values()
    assert short < 0.4 * full
    assert (
        plan.seconds == pytest.approx(short + full) == pytest.approx(run_seconds(phased, DGX2, 256))
    )
    # Memory and the step are those of the longest rows, and layouts are not searched.
    assert plan.memory == make_plan(large, DGX2, 256, search=False).memory
    assert plan.search is None
    assert len(plan.to_dict()["phase_days"]) == 2


def test_search_prefers_the_simplest_of_the_fast(large: RunConfig) -> None:
    search = search_layouts(large, DGX2, 256)
    first = search.choices[0].config
    assert (first.parallel.tensor_parallel_size, first.parallel.zero_stage) == (1, 1)
    fastest = min(choice.seconds for choice in search.choices)
    assert search.choices[0].seconds <= NEAR * fastest
    beyond = [choice.seconds for choice in search.choices if choice.seconds > NEAR * fastest]
    assert beyond == sorted(beyond) == [choice.seconds for choice in search.choices][-len(beyond) :]
    for choice in search.choices:
        assert choice.memory_bytes <= DGX2.capacity_bytes
        dp_size = 256 // choice.config.parallel.tensor_parallel_size
        assert 2048 % (choice.config.train.micro_batch_size * dp_size) == 0
    (refusal,) = search.refusals
    assert "num_heads=24" in refusal.reason
    assert refusal.layout == "TP 16"


def test_search_says_what_does_not_fit(large: RunConfig) -> None:
    small = replace(DGX2, device=replace(DGX2.device, memory_gb=8))
    search = search_layouts(large, small, 16)
    assert any("one row needs" in refusal.reason for refusal in search.refusals)
    assert all(choice.memory_bytes <= small.capacity_bytes for choice in search.choices)


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", str(RUNS / "1.5b_dgx2.yaml"), "--cluster", "dgx2", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_command_prints_json(capsys: pytest.CaptureFixture[str], large: RunConfig) -> None:
    printed = plan_json(capsys, "--json", "--layouts", "0")
    assert printed == json.loads(json.dumps(make_plan(large, DGX2, 256, search=False).to_dict()))
    assert printed["world_size"] == 256
    assert printed["layouts"] == []


def test_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "32", "--layouts", "3", "parallel.tensor_parallel_size=4"]
    assert main(["plan", str(RUNS / "1.5b_dgx2.yaml"), "--cluster", "dgx2", *arguments]) == 0
    shown = capsys.readouterr().out
    for text in ("accumulation 32 x DP 8", "tensor: layers", "data: gradients", "the first: "):
        assert text in shown
    assert "Predicted, not measured" in shown
    assert "compute   attention   tensor parallel" in shown
    assert "0.00: not in use at the moment of the peak" in shown


def test_fine_tuning_is_planned_by_task(
    capsys: pytest.CaptureFixture[str], large: RunConfig
) -> None:
    common = ["--json", "--layouts", "0", "--ranks", "16", "--settings", "release_xlarge"]
    mnli = plan_json(capsys, *common, "--task", "mnli", "--examples", "392702")
    assert mnli["batch"]["micro_batch_size"] == 4  # 64 examples over 16 ranks
    assert mnli["parameters"] < make_plan(large, DGX2, 256, search=False).parameters
    # 3 epochs of 6,136 steps
    assert mnli["days"] * 86400 == pytest.approx(18408 * mnli["step_seconds"]["total"])
    short = plan_json(
        capsys, *common, "--task", "mnli", "--examples", "392702", "--row-tokens", "48"
    )
    assert short["memory_bytes"] == mnli["memory_bytes"]
    # As docs/planning.md says.
    hours = [24 * plan["days"] for plan in (mnli, short)]
    assert hours == pytest.approx([1.8, 0.7], abs=0.05)
    assert mnli["memory_bytes"]["selective"]["total"] == pytest.approx(13.1e9, rel=0.01)
    # Every question of RACE is four rows.
    race = plan_json(capsys, *common, "--task", "race", "--examples", "87866")
    assert 24 * race["days"] == pytest.approx(4.1, abs=0.05)
    assert race["memory_bytes"]["selective"]["total"] == pytest.approx(13.6e9, rel=0.01)
    rows, length = 4 * 48, 320
    assert race["flops_per_step"] == pytest.approx(rows * length * race["flops_per_token"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ranks", "96"], ["train.global_batch_size=2048", "1536, 2304"]),
        (["--ranks", "100"], ["--ranks 100", "96 or 112"]),
        (["--ranks", "0"], ["--ranks: 0 must be at least 1"]),
        (["--examples", "5"], ["--examples needs --task NAME"]),
        (["--settings", "none"], ["--settings needs --task NAME"]),
        (["--failure-days", "3"], ["--failure-days needs checkpoint.local_every"]),
        (
            ["--cluster", "cpu", "--layouts", "3"],
            ["--layouts is about GPUs"],
        ),
        (["--cluster", "cpu", "--nodes", "2"], ["--nodes 2", "this machine alone"]),
        (["--nodes", "2", "--ranks", "32"], ["--nodes 2 and --ranks 32 contradict"]),
        (["--task", "mnli"], ["--task needs --examples"]),
        (["--device", "V1000"], ["V1000", "did you mean V100-32GB?"]),
        (["--mfu", "40"], ["--mfu 40"]),
        (["precision.dtype=bf16"], ["precision.dtype=bf16", "fp16 or fp32"]),
        (
            ["parallel.tensor_parallel_size=3", "cluster.ranks_per_node=null"],
            ["tensor_parallel_size=3", "1, 2, 4, 8, 16"],
        ),
    ],
)
def test_refusals_name_value_and_remedy(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(RUNS / "1.5b_dgx2.yaml"), "--cluster", "dgx2", *arguments]
    assert main(command) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for text in named:
        assert text in error


@pytest.mark.parametrize(
    ("gpu", "planned"),
    [
        ("NVIDIA H100 80GB HBM3, 81559", "this machine, 2 x H100-80GB"),
        ("Tesla V100-SXM3-32GB, 32768", "this machine, 2 x V100-32GB"),
        ("NVIDIA A100-SXM4-40GB, 40960", "--cluster dgx_h100, 8 x H100-80GB"),
        ("", "--cluster dgx_h100, 8 x H100-80GB"),
    ],
)
def test_command_without_options(
    gpu: str, planned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    if gpu:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{gpu}'; echo '{gpu}'\n")
        program.chmod(0o755)
    assert main(["plan", "--layouts", "0", "--json"]) == 0
    printed = capsys.readouterr()
    assert f"planning for {planned} per node; --ranks sets" in printed.err
    assert f"{json.loads(printed.out)['world_size']} x" in planned
    assert main(["plan", "train.steps=50000", "--layouts", "0"]) == 0
    shown = capsys.readouterr().out
    assert "; 50,000 steps in" in shown
    # Fused kernels leave no traffic of attention of its own.
    assert ("compute   tensor parallel" in shown) == ("V100" not in planned)


def test_a_run_without_tokenizer_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    command = ["plan", "configs/runs/small.yaml", "--layouts", "0", "--json"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "planning for model.vocab_size=128100" in printed.err
    # 32 sequences in micro batches of 16
    assert json.loads(printed.out)["world_size"] == 2
    assert "planning for 2 of the " in printed.err
    assert main([*command, "model.vocab_size=128100"]) == 0
    given = capsys.readouterr()
    assert given.out == printed.out
    assert "vocab_size" not in given.err


def test_a_cpu_is_planned_without_times(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "configs/models/tiny.yaml", "--cluster", "cpu", "--ranks", "2"]
    assert main(arguments) == 0
    done = capsys.readouterr()
    assert done.err == ""
    assert "GPU" not in done.out
    assert "ranks:    2 = TP 1 x DP 2, fp32" in done.out
    assert "fits (by recomputation: none 0.0" in done.out
    assert "not predicted for CPUs" in done.out
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    config = load_config("configs/models/tiny.yaml")
    predicted = estimate_memory(config, 2, attention="chunked", device_type="cpu").total
    assert plan["memory_bytes"]["none"]["total"] == predicted
    assert main(["plan", "configs/models/tiny.yaml", "train.device=cpu"]) == 0
    assert "not predicted for CPUs" in capsys.readouterr().out
    assert main([*arguments, "train.micro_batch_size=200000"]) == 2
    big = ["train.micro_batch_size=500000", "train.global_batch_size=1000000"]
    assert main([*arguments, *big]) == 0
    assert "does not fit, lower train.micro_batch_size" in capsys.readouterr().out


def test_a_profile_without_a_device_needs_one() -> None:
    with pytest.raises(ConfigError, match="--device"):
        machine_of(load_profile("local"))
    with pytest.raises(ConfigError, match="network_gbit_per_second"):
        machine_of(load_profile("local"), "H100")


def test_devices_are_found_by_any_name() -> None:
    assert find_device("h200") is find_device("H200-141GB")
    with pytest.raises(ConfigError, match=r"did you mean A100-80GB\?"):
        find_device("A100-80G")
    with pytest.raises(ConfigError) as refused:
        find_device("A100-40GB")
    assert "did you mean" not in str(refused.value)
    assert DGX2.device is find_device("V100")


def test_the_page_shows_the_command_s_output(capsys: pytest.CaptureFixture[str]) -> None:
    root = RUNS.parents[1]
    arguments = ["--cluster", "dgx2", "--layouts", "4"]
    assert main(["plan", str(RUNS / "1.5b_dgx2.yaml"), *arguments]) == 0
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    page = (root / "docs/planning.md").read_text()
    shown = page.split("```")[1].splitlines()[2:]
    assert len(shown) > 10
    assert {line for line in shown if line not in ("", "...")} <= printed
    assert plan_paper.table() in page


def test_local_checkpoints_cost_bytes_and_stalls_and_save_steps(large: RunConfig) -> None:
    assert make_plan(large, DGX2, 256, search=False).local_saves is None
    checkpoint = replace(large.checkpoint, local_every=50, local_dir="/l", save_every=1000)
    config = replace(large, checkpoint=checkpoint)
    plan = make_plan(config, DGX2, 256, search=False, failure_days=32)
    saves = plan.local_saves
    assert saves is not None
    # 16 nodes hold a part, and the replica of another node's, of two saves.
    assert saves.part_bytes == saves.network_bytes == 12 * plan.parameters / 16
    assert saves.disk_bytes == 4 * saves.part_bytes
    assert saves.failures_per_day == 0.5
    assert saves.lost_seconds == LostTime(500 * plan.step.total, 25 * plan.step.total)
    share = saves.stall_seconds / (50 * plan.step.total + saves.stall_seconds)
    gained = 0.5 * 475 * plan.step.total
    assert saves.saved_seconds_per_day == pytest.approx(gained - 86400 * share)
    # Rarer saves stall less; one node has no neighbour.
    rarer = replace(config, checkpoint=replace(checkpoint, local_every=500))
    assert make_plan(rarer, DGX2, 256, search=False).local_saves.stall_share < share  # type: ignore[union-attr]
    alone = make_plan(config, DGX2, 16, search=False).local_saves
    assert alone is not None
    assert (alone.network_bytes, alone.disk_bytes) == (0, 2 * 12 * plan.parameters)


@pytest.mark.parametrize(
    ("mode", "local_every", "copies", "expected"),
    [
        ("auto", 0, 2.0, True),
        ("auto", 0, 1.99, False),
        # A local save may hold its copy at the same time.
        ("auto", 5, 3.99, False),
        ("auto", 5, 4.0, True),
        ("auto", 0, 0.0, None),
        (True, 0, 0.1, True),
        (False, 0, 100.0, False),
    ],
)
def test_saves_are_in_the_background_where_memory_allows(
    large: RunConfig, mode: bool, local_every: int, copies: float, expected: bool | None
) -> None:
    """Copies of the state take at most half of a node's memory."""
    checkpoint = replace(
        large.checkpoint, asynchronous=mode, local_every=local_every, local_dir="/l"
    )
    config = replace(large, checkpoint=checkpoint)
    size = make_plan(config, DGX2, 256, search=False).copy_bytes
    machine = replace(DGX2, host_gib=copies * size / 2**30)
    assert make_plan(config, machine, 256, search=False).saves_in_background is expected


def test_documented_plan_shows_local_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (RUNS.parents[1] / "docs" / "checkpoint-format.md").read_text()
    command = shlex.split(page.split("```bash")[1].split("```")[0].replace("\\\n", ""))
    arguments = [str(RUNS.parents[1] / a) if a.startswith("configs/") else a for a in command[1:]]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "local checkpoints every 500 steps, per node: 1.18 GB written" in shown
    assert "minutes saved per day, stalls deducted" in shown
    assert re.search(r"if each node writes at least [\d.]+ MB/s and sends [\d.]+ MB/s", shown)
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["local_checkpoints"]
    assert values["failures_per_day"] == pytest.approx(16 / 60)
    assert main([*arguments, "--failure-days", "0"]) == EXIT_USAGE
    assert "--failure-days 0 must be above 0" in capsys.readouterr().err


def test_nodes_stand_for_their_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_json(capsys, "--json", "--nodes", "2", "--layouts", "0")["world_size"] == 32


def test_banner_and_plan_predict_the_same_memory() -> None:
    settings = ["model.vocab_size=8000", "train.device=cpu", "parallel.tensor_parallel_size=1"]
    config = load_config(RUNS / "quickstart.yaml", settings)
    plan = make_cpu_plan(config, 1)
    expected = plan.memory[config.parallel.recompute].total + LIBRARY_BYTES
    assert predict_rank_bytes(config) == expected
    # Of phases, the one that needs most.
    phases = (
        Phase(steps=500, overrides=(("data.sequence_length", 64),)),
        Phase(steps=500, overrides=(("objective.mask_probability", 0.5),)),
    )
    phased = replace(config, train=replace(config.train, phases=phases))
    plan = make_cpu_plan(phased, 1)
    assert (
        predict_rank_bytes(phased) == plan.memory[config.parallel.recompute].total + LIBRARY_BYTES
    )
    assert plan.memory[config.parallel.recompute].total + LIBRARY_BYTES > expected
    assert [line.split(":")[0] for line in plan.phases] == ["steps 1 to 500", "steps 501 to 1,000"]


def test_a_cpu_plan_of_fine_tuning_has_the_steps_of_its_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_task(tmp_path / "data"), tmp_path / "run.yaml"
    arguments = [str(data / "task.yaml"), "--model", str(MODEL), "--data", str(data)]
    settings = ["train.global_batch_size=8", "finetune.epochs=3", "train.device=cpu"]
    assert main(["finetune", *arguments, *settings, "--save-config", str(run)]) == 0
    capsys.readouterr()
    assert main(["plan", str(run)]) == 0
    # 37 examples
    assert " GFLOP per step, 15 steps\n" in capsys.readouterr().out
