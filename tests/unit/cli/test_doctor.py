"""What doctor finds, each alone wrong in an otherwise sound run."""

from __future__ import annotations

import shutil
import sysconfig
import time
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
import torch

from megatron_deberta.cli import doctor
from megatron_deberta.cli.main import main
from megatron_deberta.cluster import installation
from megatron_deberta.cluster.run_lock import RunLock
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.config.schema import RunConfig, TrainConfig
from megatron_deberta.ops import triton as triton_kernels
from tests.support.jobs import prepare, run_to_end


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def examine(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, list[str]]:
        code = main(["doctor", str(run_yaml), f"train.run_dir={tmp_path}/run", *arguments])
        return code, capsys.readouterr().out.splitlines()

    return call


def only_wrong(found: tuple[int, list[str]], name: str) -> str:
    code, lines = found
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert code == 2
    assert len(wrong) == 1, lines
    assert wrong[0].startswith(f"WRONG   {name}: ")
    return wrong[0]


def test_sound(examine) -> None:
    began = time.monotonic()
    code, lines = examine()
    assert time.monotonic() - began < 10
    assert code == 0, lines
    assert [line.split(":")[0] for line in lines] == [
        "ok      torch",
        "ok      run folder",
        "ok      space",
        "ok      tokenizer, data and resume",
    ]
    assert "no checkpoint yet" in lines[3]


def test_without_a_run_the_installation_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm, "call", lambda command: "slurm-wlm 23.11.4\n")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line[8:].split(":")[0] for line in lines]
    assert names == ["Python", "extras", "torch", "compiler", "DeepSpeed", "MPI", "SLURM", "disk"]
    assert "ok      SLURM: slurm-wlm 23.11.4" in lines
    assert main(["doctor", "--cluster", "local"]) == 2
    assert "--cluster needs RUN.yaml" in capsys.readouterr().err
    # Without a GPU and outside a cluster these are not needed, but they are named.
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert main(["doctor"]) == 0
    found = capsys.readouterr().out
    assert "missing compiler: no C compiler" in found
    assert "missing MPI: no mpirun" in found
    assert "missing SLURM: sbatch is not installed here" in found
    # With one they are.
    (tmp_path / "nvidia-smi").touch(0o755)
    assert main(["doctor"]) == 2
    assert "WRONG   compiler: no C compiler" in capsys.readouterr().out


def test_installation_defects_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "SUPPORTED_TORCH", ">=99")
    monkeypatch.setattr(installation, "MIN_PYTHON", (99, 0))
    monkeypatch.setattr(installation, "MIN_FREE_GIB", 1e9)

    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: ["deepspeed; extra == 'train'"])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    assert main(["doctor"]) == 2
    found = capsys.readouterr().out
    for line in (
        "WRONG   Python: ", "WRONG   torch: ", "missing DeepSpeed: deepspeed is not installed",
        "WRONG   disk: ", "compiler: /nowhere/Python.h is missing",
    ):  # fmt: skip
        assert line in found


def test_torch(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "SUPPORTED_TORCH", ">=99")
    assert "is not >=99; install a supported version" in only_wrong(examine(), "torch")


def test_compiler_of_a_run_that_needs_one(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = examine("parallel.fuse=true")
    assert code == 0, lines
    assert lines[1].startswith("ok      compiler: ")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    found = only_wrong(examine("parallel.fuse=true"), "compiler")
    assert "/nowhere/Python.h is missing" in found


@pytest.mark.parametrize(
    ("device", "available", "capability", "expected"),
    [
        ("auto", True, (8, 0), True),
        ("auto", True, (7, 0), False),
        ("auto", False, (8, 0), False),
        ("cpu", True, (8, 0), False),
    ],
)
def test_runs_on_gpus_with_kernels_need_a_compiler(
    device: str,
    available: bool,
    capability: tuple[int, int],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton_kernels, "TRITON_INSTALLED", True)
    assert doctor.compiles(RunConfig(train=TrainConfig(device=device))) == expected


def test_folder_in_use(examine, tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"):
        assert "is in use by process" in only_wrong(examine(), "run folder")


def test_folder_that_is_a_file(examine, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    code, lines = examine()
    assert code == 2
    assert any(line.startswith("WRONG   run folder: ") for line in lines)


def test_clock(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert "start NTP" in only_wrong(examine(), "run folder")


def test_space(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    assert "a checkpoint takes" in only_wrong(examine(), "space")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tokenizer.path=/nowhere", "/nowhere"),
        ("data.train=[/nowhere]", "/nowhere"),
        ("model.vocab_size=100", "model.vocab_size=100 is smaller than"),
    ],
)
def test_data(examine, override: str, message: str) -> None:
    assert message in only_wrong(examine(override), "tokenizer, data and resume")


def test_another_tokenizer(examine, run_yaml: Path, tmp_path: Path) -> None:
    text, other = run_yaml.parent / "docs.jsonl", tmp_path / "other"
    made = ["train-tokenizer", "--input", str(text), "--vocab-size", "400", "--output", str(other)]
    assert main(made) == 0
    assert "tokenizer" in only_wrong(
        examine(f"tokenizer.path={other}"), "tokenizer, data and resume"
    )


def test_checkpoint_of_another_run(examine, run_yaml: Path, tmp_path: Path) -> None:
    run_to_end(
        run_yaml, tmp_path / "run", 1, "parallel.engine=plain", "train.exit_step=1",
        "data.num_workers=0", "train.eval_every=null",
    )  # fmt: skip
    code, lines = examine()
    assert code == 0, lines
    assert "goes on from" in lines[3]
    found = only_wrong(examine("train.seed=9"), "tokenizer, data and resume")
    assert "train.seed=9 but the checkpoint of step 1 was trained with 1234" in found


def test_cluster(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "call", lambda command: "normal\nurgent\nnormal\n")
    code, lines = examine("--cluster", "local", "--nodes", "2")
    assert code == 0, lines
    assert lines[-1] == "ok      SLURM: answers; partitions normal, urgent"
    found = only_wrong(examine("--cluster", "local", "--nodes", "3"), "cluster")
    assert "global_batch_size=8" in found


def test_slurm_is_not_here(examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = only_wrong(examine("--cluster", "local", "--nodes", "2"), "SLURM")
    assert "sbatch is not installed here" in found


def test_packages_that_an_extra_lacks_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = installation.metadata.version

    def without(name: str) -> str:
        if name in ("orjson", "rensa", "deepspeed"):
            raise installation.metadata.PackageNotFoundError(name)
        return installed(name)

    needed = {
        "train": ["deepspeed>=0.19", "orjson"],
        "text": ["orjson", "rensa"],
        "finetune": ["megatron-deberta[train]"],
        "onnx": ["onnx>=1.17", "orjson"],
        "wandb": ["wandb"],
    }
    lines = [f"{line}; extra == '{extra}'" for extra, names in needed.items() for line in names]
    monkeypatch.setattr(installation.metadata, "requires", lambda name: ["torch", *lines])
    monkeypatch.setattr(installation.metadata, "version", without)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if "extras" in line)
    assert line.startswith("missing extras: complete: mpi, dask, wandb; ")
    assert "text lacks orjson, rensa; finetune lacks deepspeed, orjson; onnx lacks orjson" in line
    # The models need none of them.
    assert "missing DeepSpeed" in printed
