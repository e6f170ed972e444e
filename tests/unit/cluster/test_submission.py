"""What sbatch and srun are told, for every kind of cluster, and what is refused before they are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.cluster import installation
from megatron_deberta.cluster.profile import ClusterProfile, load_profile
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm import submit
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.job import job_file
from megatron_deberta.cluster.slurm.submit import (
    BATCH_SCRIPT,
    JobSpec,
    make_spec,
    sbatch_command,
)
from megatron_deberta.cluster.watchdog.supervisor import node_plan
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig, TrainConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import FileLock
from tests.support.jobs import ROOT

LOGS = Path("/runs/a/logs/7.0")


def spec_of(profile: ClusterProfile, **values: object) -> JobSpec:
    arguments = {
        "nodes": 16, "run_dir": Path("/runs/a"), "job_name": "a",
        "submission": Path("/runs/a/submissions/1"), **values,
    }  # fmt: skip
    return make_spec(profile, **arguments)  # type: ignore[arg-type]


def test_sixteen_dgx2_nodes() -> None:
    profile = load_profile("dgx2")
    spec = spec_of(profile)
    command = sbatch_command(spec, profile, Path("/runs/a/submissions/1/job.json"))
    assert {
        "--nodes=16", "--ntasks-per-node=1", "--gres=gpu:16", "--export=NONE", "--requeue",
        "--signal=USR1@600", "--time=1440", "--exclusive",
        "--output=/runs/a/logs/job_%j.log", "--cpus-per-task=48", "--mem=0",
    } <= set(command)  # fmt: skip
    assert not any(text.startswith("--dependency") for text in command)
    assert "--dependency=afterany:41" in sbatch_command(spec, profile, Path("/j"), after="41")
    script = command[-4:]
    assert script[0] == str(BATCH_SCRIPT)
    assert script[-1] == "/runs/a/submissions/1/job.json"
    srun = spec.srun_command(LOGS, "10.0.0.1:12345")
    assert {
        "--nodes=16", "--ntasks=16", "--ntasks-per-node=1", "--cpus-per-task=48",
        "--distribution=block:block", "--kill-on-bad-exit=0", "--wait=90",
        "--output=/runs/a/logs/7.0/node_%t.log",
    } <= set(srun)  # fmt: skip
    supervisor = "megatron_deberta.cluster.watchdog.supervisor"
    job_file = "/runs/a/logs/7.0/job.json"
    assert srun[-5:] == [spec.python, "-m", supervisor, job_file, "7.0"]
    assert spec.environment["NCCL_IB_HCA"] == "mlx5"
    assert profile.gpu_architecture == "sm_70"
    assert "bf16" not in profile.dtypes


def test_a_supervisor_runs_its_node_s_ranks(tmp_path: Path) -> None:
    spec = spec_of(load_profile("dgx2"), submission=tmp_path, allow_config_change=True)
    (tmp_path / "run.yaml").write_text("cluster: {step_timeout_seconds: 300}\n")
    plan = node_plan(spec, "7.2", {"SLURM_NODEID": "3", "SLURMD_NODENAME": "dgx04"})
    config = str(tmp_path / "run.yaml")
    ran = (spec.python, "-m", "megatron_deberta", "pretrain", config, "--allow-config-change")
    assert plan.command == ran
    assert (plan.node, plan.num_nodes, plan.ranks_per_node, plan.host) == (3, 16, 16, "dgx04")
    assert plan.logs == Path("/runs/a/logs/7.2")
    assert plan.config.step_timeout_seconds == 300


def test_fewer_nodes_where_there_are_no_more() -> None:
    profile = load_profile("dgx2")
    spec = spec_of(profile, min_nodes=8)
    command = sbatch_command(spec, profile, Path("/j"))
    assert "--nodes=8-16" in command
    assert "--ntasks-per-node=1" not in command
    config = RunConfig(train=TrainConfig(global_batch_size=2048, micro_batch_size=8))
    # 256 micro batches: over 16 ranks a node, a power of two nodes.
    assert [spec.for_nodes(config, given).nodes for given in (17, 16, 15, 8)] == [16, 16, 8, 8]
    assert spec.for_nodes(config, 15) == replace(spec, nodes=8)
    odd = RunConfig(train=TrainConfig(global_batch_size=24, micro_batch_size=8))
    with pytest.raises(ConfigError, match="global_batch_size=24 does not divide over any of 1 to"):
        spec.for_nodes(odd, 15)


def test_bad_nodes_are_avoided_besides_the_profile_s() -> None:
    profile = replace(load_profile("local"), exclude="n1,n2")
    spec = spec_of(profile)
    plain = sbatch_command(spec, profile, Path("/j"))
    assert "--exclude=n1,n2" in plain
    assert "--exclude=n1,n2,n7" in sbatch_command(spec, profile, Path("/j"), bad_nodes=("n7",))
    spec = spec_of(load_profile("local"))
    assert not any("exclude" in text for text in sbatch_command(spec, profile, Path("/j")))
    # Any number of them.
    nodes = tuple(f"gpu-node-{number:04d}.cluster.example.org" for number in range(300))
    profile = replace(load_profile("local"), exclude=",".join(nodes[:20]))
    command = sbatch_command(spec_of(profile), profile, Path("/j"), bad_nodes=nodes)
    assert f"--exclude={','.join(nodes)}" in command
    with pytest.raises(ConfigError, match="exclude="):
        sbatch_command(spec_of(profile), profile, Path("/j"), bad_nodes=(*nodes, "-x"))


def test_containers_and_torchrun() -> None:
    profile = replace(
        load_profile("dgx_h100"), container="pyxis", container_image="nvcr.io#nvidia/pytorch:26.10",
        container_mounts=("/lustre:/lustre", "/data:/data:ro"),
    )  # fmt: skip
    srun = spec_of(profile).srun_command(LOGS, "h:1")
    assert "--container-image=nvcr.io#nvidia/pytorch:26.10" in srun
    assert "--container-mounts=/lustre:/lustre,/data:/data:ro" in srun
    profile = replace(profile, container="apptainer", container_image="/images/a.sif")
    srun = spec_of(profile).srun_command(LOGS, "h:1")
    at = srun.index("apptainer")
    assert srun[at : at + 6] == [
        "apptainer", "exec", "--nv", "--bind=/lustre:/lustre", "--bind=/data:/data:ro",
        "/images/a.sif",
    ]  # fmt: skip
    profile = replace(load_profile("dgx_h100"), launcher="torchrun")
    spec = spec_of(profile, nodes=2)
    assert "--ntasks=2" in spec.srun_command(LOGS, "h:1")
    assert "--nproc-per-node=8" in spec.srun_command(LOGS, "h:1")
    assert "--rdzv-endpoint=h:1" in spec.srun_command(LOGS, "h:1")
    command = sbatch_command(spec, profile, Path("/j"))
    assert {"--ntasks-per-node=1", "--cpus-per-task=112", "--signal=TERM@600"} <= set(command)


def test_job_file_round_trip(tmp_path: Path) -> None:
    spec = spec_of(load_profile("local"))
    path = tmp_path / "job.json"
    path.write_bytes(spec.to_json())
    assert JobSpec.read(path) == spec
    path.write_text(json.dumps({**json.loads(spec.to_json()), "more": 1}))
    with pytest.raises(ConfigError, match="not a job of this release"):
        JobSpec.read(path)


def test_text_of_a_profile_stands_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "ranks_per_node: 1\npartition: 0123\naccount: 2024_1\nqos: no\n"
        "environment: {NCCL_ALGO: 010, NCCL_DEBUG: off, OMP_NUM_THREADS: 4}"
    )
    profile = load_profile(str(path))
    assert (profile.partition, profile.account, profile.qos) == ("0123", "2024_1", "no")
    assert profile.environment == {
        "NCCL_ALGO": "010", "NCCL_DEBUG": "off", "OMP_NUM_THREADS": "4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks_per_node: 2\nqso: x", "no key qso; did you mean qos"),
        ("qos: x", "ranks_per_node is missing"),
        ("ranks_per_node: two", "is not of type int"),
        ("ranks_per_node: 0", "at least 1"),
        ("ranks_per_node: 1\ngpus_per_node: -1", "negative"),
        ("ranks_per_node: 1\nlauncher: ssh", "launcher='ssh'"),
        ("ranks_per_node: 1\nenvironment: {LD_PRELOAD: /x.so}", "environment='LD_PRELOAD'"),
        ("ranks_per_node: 1\nenvironment: {HF_TOKEN: x}", "environment='HF_TOKEN'"),
        ("ranks_per_node: 1\ntime_limit_minutes: 1\nsignal_seconds: 60", "leave time to train"),
        ("ranks_per_node: 1\ncontainer: pyxis", "set both a runtime and an image"),
        ("ranks_per_node: 1\npython: ${HOME}/python", "write the value"),
        ("ranks_per_node: 1\nranks_per_node: 2", "is duplicated"),
    ],
)
def test_profiles_are_parsed_strictly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))) as caught:
        load_profile(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        "python: /home/colleague/python",
        "container: pyxis\ncontainer_image: /home/colleague/image.sqsh",
        *(
            f"environment: {{{name}: /home/colleague/x}}"
            for name in (
                "LD_LIBRARY_PATH", "NCCL_NET_PLUGIN", "CUDA_INJECTION64_PATH", "NCCL_TUNER_PLUGIN",
                "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR",
                "OMP_TOOL_LIBRARIES", "FI_PROVIDER_PATH", "UCX_MODULE_DIR", "PYTHONPATH",
            )
        ),
    ],
)  # fmt: skip
def test_profile_that_can_run_code_needs_trust(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"ranks_per_node: 1\n{setting}\n")
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: .*--trust-profile"):
        load_profile(str(path))
    load_profile(str(path), trusted=True)
    run = str(ROOT / "configs" / "runs" / "small.yaml")
    arguments = (run, "--cluster", str(path), f"train.run_dir={tmp_path}/run", "--nodes", "1")
    code, printed, error = dry_run(capsys, *arguments)
    assert (code, printed) == (2, "")
    assert "--trust-profile" in error
    code, _, error = dry_run(capsys, *arguments, "--trust-profile")
    assert code == 0, error


def test_unknown_profile() -> None:
    with pytest.raises(ConfigError, match="dgx2, dgx_h100, local"):
        load_profile("dgx3")


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Print a submission of a run whose data are not here."""
    code = main(["submit", *arguments, "--dry-run", "--no-check"])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1.5b_h100.yaml", "--cluster", "dgx2"),
            "is not supported by the cluster's devices; use fp16 or fp32",
        ),
        (("1.5b_dgx2.yaml", "--cluster", "dgx2", "--nodes", "15"), "global_batch_size=2048 is not"),
        (("1.5b_dgx2.yaml", "--cluster", "dgx2", "parallel.tensor_parallel_size=3"), "tensor_par"),
        (("1.5b_dgx2.yaml", "--cluster", "dgx2", "--nodes", "0"), "--nodes 0 must be at least 1"),
        *(
            (
                ("1.5b_dgx2.yaml", "--cluster", "dgx2", "--nodes", "2", "--min-nodes", least),
                f"--min-nodes {least} must be between 1 and --nodes 2",
            )
            for least in ("0", "3")
        ),
        (("1.5b_dgx2.yaml", "--cluster", "dgx2", "--job-name", "a b"), "--job-name='a b'"),
        (("1.5b_dgx2.yaml", "--cluster", "dgx2", "--max-attempts", "0"), "--max-attempts: 0 must"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    run = str(ROOT / "configs" / "runs" / arguments[0])
    code, _, errors = dry_run(capsys, run, *arguments[1:])
    assert code == 2
    assert message in errors


def test_dry_run_prints_all_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = str(ROOT / "configs" / "runs" / "1.5b_dgx2.yaml")
    run_dir = f"train.run_dir={tmp_path}/run"
    code, printed, errors = dry_run(capsys, run, "--cluster", "dgx2", run_dir)
    assert code == 0, errors
    assert "sbatch --parsable --export=NONE --job-name=run --nodes=16" in printed
    assert "--ntasks=16 --ntasks-per-node=1 --cpus-per-task=48 --distribution=block" in printed
    assert BATCH_SCRIPT.read_text() in printed
    assert '"NCCL_IB_HCA": "mlx5"' in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=[/nowhere/docs]", "/nowhere/docs"),
        ("tokenizer.path=/nowhere/tokenizer", "/nowhere/tokenizer"),
        ("checkpoint.resume=auto", ""),
    ],
)
def test_files_of_the_run_are_checked_first(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    override: str,
    message: str,
) -> None:
    monkeypatch.setattr(slurm, "call", lambda command: "41\n")
    run = tmp_path / "run.yaml"
    shards, tokenizer = (ROOT / "tests/golden/c6955b0" / name for name in ("shards", "tokenizer"))
    run.write_text(
        f"data: {{train: {shards}/docs_text_document}}\ntokenizer: {{path: {tokenizer}}}\n"
        "model: {num_layers: 1, hidden_size: 16, num_heads: 2, ffn_hidden_size: 16, "
        "vocab_size: auto}"
    )
    run_dir = tmp_path / "run"
    options = ["--cluster", "local", "--nodes", "1", f"train.run_dir={run_dir}", override]
    expected = 2 if message else 0
    assert main(["submit", str(run), *options, "--dry-run"]) == expected
    printed = capsys.readouterr().out
    assert ("# error" in printed) == bool(message)
    assert message in printed.splitlines()[-1]
    assert main(["submit", str(run), *options]) == expected
    printed = capsys.readouterr()
    assert (message if message else "submitted 41;") in printed.err + printed.out
    assert run_dir.exists() == (not message)
    if message:
        assert "--no-check" in printed.err
        assert main(["submit", str(run), *options, "--no-check"]) == 0


def test_a_run_is_submitted_by_one_command_at_a_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "submissions").mkdir(parents=True)
    lock = FileLock(run_dir / "submissions" / ".lock")
    assert lock.acquire()
    run = str(ROOT / "configs" / "runs" / "small.yaml")
    options = ["--cluster", "local", "--nodes", "1", "--no-check", f"train.run_dir={run_dir}"]
    assert main(["submit", run, *options]) == 2
    assert "is being submitted by another command" in capsys.readouterr().err
    lock.release()


def test_only_named_variables_of_the_shell_reach_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HF_TOKEN", "secret")
    run = str(ROOT / "configs" / "runs" / "1.5b_dgx2.yaml")
    arguments = (run, "--cluster", "dgx2", f"train.run_dir={tmp_path}/run")

    def environment(*options: str) -> dict[str, str]:
        code, printed, errors = dry_run(capsys, *arguments, *options)
        assert code == 0, errors
        found: dict[str, str] = json.loads(
            printed.partition("# job.json:")[2].partition("\n# ")[0]
        )["environment"]
        return found

    expected = {
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        **load_profile("dgx2").environment,
    }  # fmt: skip
    assert environment() == expected
    given = environment("--export", "WANDB_MODE", "--export", "NCCL_IB_HCA=mlx5_0,a=b")
    assert given == {**expected, "WANDB_MODE": "offline", "NCCL_IB_HCA": "mlx5_0,a=b"}
    for option, message in (
        ("NOT_SET_HERE", "no such variable here"), ("A B=1", "--export='A B'"),
        ("A=x\ny", "--export A='x"),
    ):  # fmt: skip
        code, _, errors = dry_run(capsys, *arguments, "--export", option)
        assert code == 2
        assert message in errors


def test_torch_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "(cu130) has no kernels for sm_70; install a" in installation.torch_problem(
        "sm_70", ["cu126"]
    )
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert installation.torch_problem("sm_70", ["cu126"]) == ""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert installation.torch_problem("", []) == ""
    assert "(cpu)" in installation.torch_problem("sm_90", ["cu126"])


@pytest.mark.parametrize(
    ("capability", "architectures", "fits"),
    [
        ((7, 0), ["sm_50", "sm_70", "sm_80"], True),
        ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_90"], False),
        ((7, 5), ["sm_70"], True),
        ((8, 6), ["sm_80"], True),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100", "unknown"], True),
        ((12, 0), ["sm_90a"], False),
        ((7, 0), [], False),
    ],
)
def test_kernels_for_the_device(
    capability: tuple[int, int], architectures: list[str], fits: bool
) -> None:
    if fits:
        installation.check_architecture(capability, architectures)
    else:
        with pytest.raises(ConfigError, match=f"no kernels for sm_{capability[0]}{capability[1]}"):
            installation.check_architecture(capability, architectures)


def test_supported_torch_is_declared_once() -> None:
    assert f'"torch{installation.SUPPORTED_TORCH}"' in (ROOT / "pyproject.toml").read_text()
    installation.check_torch_version("2.13.0+cpu")
    installation.check_torch_version("2.6.0+cu126")
    for wrong in ("2.5.1", "3.0.0"):
        with pytest.raises(ConfigError, match=f"torch {wrong} is not"):
            installation.check_torch_version(wrong)


PROFILE = ClusterProfile(ranks_per_node=8, gpus_per_node=8, memory_gib_per_node=100, exclusive=True)


@pytest.fixture
def configs(tmp_path: Path) -> list[RunConfig]:
    config = load_config(None)
    sized = replace(config, cluster=replace(config.cluster, nodes=1, ranks_per_node=2))
    return [
        replace(sized, train=replace(sized.train, run_dir=str(tmp_path / f"run_{number}")))
        for number in range(3)
    ]


def test_runs_are_queued_once(
    configs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Sequence[str]] = []
    queue = ""

    def call(command: Sequence[str]) -> str:
        calls.append(command)
        return queue if command[0] == "squeue" else "77;cluster\n"

    monkeypatch.setattr(slurm, "call", call)
    profile, nodes = submit.profile_of_ranks(PROFILE, 2)
    assert nodes == 1
    assert submit.submit_arrays(profile, configs, tmp_path / "out", 2) == (["77"], 0)
    command = calls[-1]
    assert "--array=0-2%2" in command
    assert "--gres=gpu:2" in command
    assert "--mem=25G" in command
    assert "--exclusive" not in command
    (jobs_file,) = (tmp_path / "out" / "submissions").glob("*/jobs_0.json")
    assert command[-1] == str(jobs_file)
    assert f"--output={jobs_file.parent}/job_%A_%a.log" in command
    for index, config in enumerate(configs):
        found = job_file(str(jobs_file), {"SLURM_ARRAY_TASK_ID": str(index)})
        spec = JobSpec.read(found)
        assert (spec.run_dir, spec.ranks_per_node) == (config.train.run_dir, 2)
        assert load_config(spec.config).train == config.train
        assert JobHistory(spec.run_dir).submitted_jobs() == [f"77_{index}"]
    with pytest.raises(ConfigError, match="no job 3; submit the search again"):
        job_file(str(jobs_file), {"SLURM_ARRAY_TASK_ID": "3"})
    assert job_file("job.json", {"SLURM_JOB_ID": "5"}) == "job.json"

    queue = "77_0\n77_2\n12\n"
    monkeypatch.setattr(time, "strftime", lambda _: "later")
    assert submit.submit_arrays(profile, configs, tmp_path / "out") == (["77"], 2)
    assert "--array=0-0" in calls[-1]


def test_a_large_search_becomes_several_arrays(
    configs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "MAX_ARRAY_SIZE", 2)
    lines = submit.describe_arrays(PROFILE, configs, tmp_path / "out").splitlines()
    assert [line.partition("--array=")[2].split()[0] for line in lines] == ["0-1", "0-0"]
    assert not (tmp_path / "out").exists()


def test_an_element_is_named_by_its_array() -> None:
    # The array's number alone would stand for all elements in scancel and scontrol.
    assert slurm.current_job({"SLURM_JOB_ID": "77"}) == "77"
    assert slurm.current_job({"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "76"}) == "77"
    empty = {"SLURM_ARRAY_JOB_ID": "76", "SLURM_ARRAY_TASK_ID": ""}
    assert slurm.current_job({"SLURM_JOB_ID": "77", **empty}) == "77"
    assert job_file("job.json", {"SLURM_ARRAY_TASK_ID": ""}) == "job.json"
    element = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "4"}
    assert slurm.current_job(element) == "77_4"
    assert slurm.current_job({}) == ""


def test_profile_of_the_page_is_complete(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    file = tmp_path / "site.yaml"
    file.write_text(page.partition("complete profile")[2].split("```")[1].removeprefix("yaml"))
    profile = load_profile(str(file))
    assert profile.gpu_type == "a100"
    assert profile.sbatch_options == ("--constraint=ib", "--reservation=course")


def test_options_of_a_site() -> None:
    profile = replace(
        PROFILE, gpus_per_node=4, gpu_type="a100",
        sbatch_options=("--constraint=a100&ib", "--reservation=x"),
    )  # fmt: skip
    command = sbatch_command(spec_of(profile), profile, Path("/runs/a/job.json"))
    assert "--gres=gpu:a100:4" in command
    first = command.index("--constraint=a100&ib")
    assert command[first + 1 : first + 3] == ["--reservation=x", str(BATCH_SCRIPT)]


@pytest.mark.parametrize(
    "option", ["--nodes=2", "--export=ALL", "--constraint", "--constraint=a b", "script.sh"]
)
def test_other_options_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="sbatch_options"):
        replace(PROFILE, sbatch_options=(option,))


def test_runs_of_several_nodes_keep_the_profile() -> None:
    assert submit.profile_of_ranks(PROFILE, 16) == (PROFILE, 2)
    assert submit.profile_of_ranks(PROFILE, 8) == (PROFILE, 1)
