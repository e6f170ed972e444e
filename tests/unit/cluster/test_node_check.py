"""The node check: its findings, and checks that hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.cluster import node_check
from megatron_deberta.cluster.profile import ClusterProfile, load_profile
from megatron_deberta.cluster.slurm.submit import JobSpec, make_spec
from megatron_deberta.errors import ConfigError
from tests.support.jobs import ROOT

SMI = """\
#!/bin/sh
case "$1" in
  *ecc*) printf '0, 0\\n1, 3\\n2, [N/A]\\n' ;;
  *) printf 'Tesla V100\\nTesla V100\\n' ;;
esac
"""


def spec_of(folder: Path, nodes: int = 1, **values: object) -> JobSpec:
    profile = ClusterProfile(ranks_per_node=2, node_check=True)
    spec = make_spec(
        profile, nodes=nodes, run_dir=folder, job_name="a", submission=folder,
    )  # fmt: skip
    return replace(spec, **values)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated nvidia-smi with two GPUs, one of which has memory errors."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_every_check_on_this_machine(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, cpus_per_rank=1, ranks_per_node=1)
    (tmp_path / "job.json").write_bytes(spec.to_json())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_NODEID": "0"}
    command = [sys.executable, "-m", "megatron_deberta.cluster.node_check"]
    done = subprocess.run(
        [*command, str(tmp_path / "job.json"), "7.0"],
        env={**environment, "SLURMD_NODENAME": "n1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(node_check.CHECKS)
    assert all(line.startswith("ok    n1 ") for line in lines)
    assert "TFLOP/s in fp32 on the processor" in done.stdout
    report = json.loads(node_check.report_path(str(tmp_path), "7.0", 0).read_bytes())
    assert [item["check"] for item in report["findings"]] == list(node_check.CHECKS)
    assert node_check.failures(str(tmp_path), "7.0", 1) == {}


@pytest.mark.slow
def test_all_reduce_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_check.all_reduce_on_node(spec_of(tmp_path)).endswith(" GB/s")
    monkeypatch.setattr(node_check, "_all_reduce", lambda places: 1.0)
    with pytest.raises(ConfigError, match=r"^1\.0 of 100000\.0 GB/s; check links"):
        node_check.all_reduce_on_node(spec_of(tmp_path, least_node_gb_per_second=1e5))


def test_missing_gpus_and_memory_errors(tmp_path: Path, gpus: None) -> None:
    assert node_check.devices(spec_of(tmp_path, gpus_per_node=2)) == "2 x Tesla V100"
    with pytest.raises(ConfigError, match="2 of 16 GPUs; drain the node"):
        node_check.devices(spec_of(tmp_path, gpus_per_node=16))
    with pytest.raises(ConfigError, match="uncorrected memory errors on GPU 1; "):
        node_check.ecc(spec_of(tmp_path, gpus_per_node=2))


def test_cores_disk_and_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cores, on NUMA nodes" in node_check.processors(spec_of(tmp_path, ranks_per_node=1))
    with pytest.raises(ConfigError, match="of 2000 cores allowed"):
        node_check.processors(spec_of(tmp_path, cpus_per_rank=1000))
    assert "MiB flushed" in node_check.disk(spec_of(tmp_path))
    with pytest.raises(OSError, match="No such file"):
        node_check.disk(spec_of(tmp_path / "missing"))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 60)
    with pytest.raises(ConfigError, match=r"-60\.0 s from the clock of .*; start NTP"):
        node_check.clock(spec_of(tmp_path))


@pytest.mark.slow
def test_check_that_hangs_fails_and_the_next_ones_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: None
) -> None:
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "job.json").write_bytes(spec_of(tmp_path, gpus_per_node=1).to_json())
    monkeypatch.setitem(node_check.CHECKS, "devices", (node_check.devices, 2.0))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = node_check.check_node(str(tmp_path / "job.json"), ["devices", "clock"])
    assert [(item.check, item.ok) for item in found] == [("devices", False), ("clock", True)]
    assert found[0].text == "no answer in 2 s; inspect the node"


def test_failures_name_the_bad_node(tmp_path: Path) -> None:
    def report(node: int, **failed: str) -> None:
        path = node_check.report_path(str(tmp_path), "7.0", node)
        path.parent.mkdir(parents=True, exist_ok=True)
        findings = [{"check": k, "text": v, "ok": False} for k, v in failed.items()]
        path.write_text(json.dumps({"host": f"n{node}", "findings": findings}))

    across = {node_check.ACROSS: "an all-reduce failed"}
    report(0, **across)
    report(1, **across, ecc="errors")
    report(2)
    # The all-reduce fails on all nodes that communicate with a bad one.
    assert node_check.failures(str(tmp_path), "7.0", 4) == {"n1": "ecc: errors"}
    report(1)
    found = node_check.failures(str(tmp_path), "7.0", 4)
    assert found == {"n0": f"{node_check.ACROSS}: an all-reduce failed"}


def test_profiles_with_gpus_check_their_nodes() -> None:
    for name, checked in (("dgx2", True), ("dgx_h100", True), ("local", False)):
        profile = load_profile(name)
        assert profile.node_check is checked
    spec = spec_of(Path("/runs/a"), nodes=16)
    command = spec.check_command(Path("/runs/a/logs/7.0"))
    assert {"--ntasks=16", "--output=/runs/a/logs/7.0/check_%t.log"} <= set(command)
    module = "megatron_deberta.cluster.node_check"
    assert command[-4:] == ["-m", module, "/runs/a/logs/7.0/job.json", "7.0"]
