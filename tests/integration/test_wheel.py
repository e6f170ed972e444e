"""The built wheel, installed outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_deberta.cli.main import COMMANDS
from tests.support.jobs import ROOT, TIMEOUT, without_launcher

pytestmark = pytest.mark.slow
Command = Callable[..., str]


def run(command: list[str], **options: object) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, **options)  # type: ignore[call-overload]
    assert finished.returncode == 0, f"{command}\n{finished.stdout}{finished.stderr}"
    printed: str = finished.stdout
    return printed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, without files of earlier builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_deberta", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    run([*pip, *build, str(source)])
    shutil.rmtree(source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Return a function that runs a command of a new environment, in an empty folder.

    The environment finds dependencies of the current one with a ``.pth`` file. Nested ``.pth``
    files are not read, so an editable install of the checkout is not visible.
    """
    folder = tmp_path_factory.mktemp("installed")
    environment, work = folder / "venv", folder / "work"
    work.mkdir()
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = without_launcher() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    variables.pop("PYTHONPATH", None)

    def call(*arguments: str) -> str:
        return run([str(python.parent / arguments[0]), *arguments[1:]], cwd=work, env=variables)

    return call


def test_wheel_contains_the_data_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = "megatron_deberta"
    expected = {f"{package}/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/*/*.yaml")}
    for pattern in ("cluster/profiles/*.yaml", "cluster/slurm/job.sbatch", "py.typed", "**/*.py"):
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / package).glob(pattern)}
    assert expected <= names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", "configs/"))}


def test_installed_package_is_the_wheel(installed: Command) -> None:
    where = installed("python", "-c", "import megatron_deberta as m; print(m.__file__)")
    assert "/venv/lib/" in where
    assert str(ROOT) not in where


def test_every_command_has_help(installed: Command) -> None:
    names = [command.name for command in COMMANDS]
    program = (
        "from megatron_deberta.cli.main import main\n"
        f"for name in {names!r}:\n"
        "    try:\n"
        "        main([name, '--help'])\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, name\n"
    )
    printed = installed("python", "-c", program)
    for name in names:
        assert f"usage: megatron-deberta {name}" in printed
    assert "pretrain" in installed("megatron-deberta", "--help")


def test_plan_and_submit_find_configs_and_profiles(installed: Command) -> None:
    config = "configs/runs/1.5b_dgx2.yaml"
    assert "tokens" in installed("megatron-deberta", "plan", config, "--cluster", "dgx2")
    options = ["--cluster", "dgx2", "--dry-run", "--no-check"]
    submission = installed("megatron-deberta", "submit", config, *options)
    assert "sbatch --parsable" in submission
    assert "megatron_deberta.cluster.slurm.job" in submission


def test_pretrain_convert_and_fill_mask(installed: Command, run_yaml: Path, tmp_path: Path) -> None:
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    short = ["train.steps=2", "optimizer.warmup_steps=1", "train.eval_every=null"]
    overrides = [f"train.run_dir={run_dir}", *short, "precision.engine=plain"]
    installed("megatron-deberta", "pretrain", str(run_yaml), *overrides)
    assert (run_dir / "checkpoints/step_00000002/COMMITTED").exists()
    convert = ["--checkpoint", str(run_dir), "--to", "hf", "--output", str(exported)]
    installed("megatron-deberta", "convert", *convert)
    text = "The value is [MASK]."
    assert "[MASK]" in installed("megatron-deberta", "fill-mask", str(exported), text)
