"""The built distributions, installed outside of the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.jobs import ROOT, TIMEOUT, without_launcher

pytestmark = pytest.mark.slow
Command = Callable[..., str]
WITHOUT_EXTRAS = """
import importlib.util
import torch
from transformers import DebertaV2Config, DebertaV2Model
import megatron_deberta
from megatron_deberta.hf import use_fast_attention
from megatron_deberta.ops import disentangled_attention

sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
config = DebertaV2Config(**sizes, intermediate_size=64, vocab_size=50, relative_attention=True)
model = DebertaV2Model(config).eval()
use_fast_attention(model)
print(tuple(model(torch.ones(1, 5, dtype=torch.long)).last_hidden_state.shape))
print("deepspeed", "there" if importlib.util.find_spec("deepspeed") else "absent")
"""


def run(command: list[str], **options: object) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, **options)  # type: ignore[call-overload]
    assert finished.returncode == 0, f"{command}\n{finished.stdout}{finished.stderr}"
    printed: str = finished.stdout
    return printed


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel that is built from it, without older files."""
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_deberta", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    run([*build, str(source)])
    shutil.rmtree(source)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (built,) = distributions.glob("*.whl")
    return built


def required(name: str) -> Iterator[importlib.metadata.Distribution]:
    """Yield an installed distribution and all that it requires."""
    left, seen = [name], set()
    while left:
        found = importlib.metadata.distribution(left.pop())
        if found.name in seen:
            continue
        seen.add(found.name)
        yield found
        needs = map(Requirement, found.requires or ())
        left += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def with_torch_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with torch, in which pip has installed the wheel.

    torch, which takes minutes to install, is linked from the current environment.
    """
    environment = tmp_path_factory.mktemp("torch_alone")
    venv.create(environment, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    for found in required("torch"):
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (site / name).symlink_to(Path(str(found.locate_file(name))))
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "--quiet", str(wheel)])
    return python


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


def test_distributions_are_fit_for_the_index(distributions: Path) -> None:
    files = sorted(map(str, distributions.iterdir()))
    assert len(files) == 2
    printed = run([sys.executable, "-m", "twine", "check", "--strict", *files])
    assert printed.count("PASSED") == 2, printed
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as stream:
        names = {name.partition("/")[2] for name in stream.getnames()}
    assert {"LICENSE", "README.md", "configs/runs/small.yaml"} <= names


@pytest.mark.nightly
def test_without_extras_the_models_and_fast_attention_run(
    with_torch_alone: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_EXTRAS)
    variables = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    # -I: no folder of this checkout is on the path.
    printed = run([str(with_torch_alone), "-I", str(program)], cwd=tmp_path, env=variables)
    assert printed.split() == ["(1,", "5,", "64)", "deepspeed", "absent"]


def test_installed_package_is_the_wheel(installed: Command) -> None:
    where = installed("python", "-c", "import megatron_deberta as m; print(m.__file__)")
    assert "/venv/lib/" in where
    assert str(ROOT) not in where


def test_pretrain_convert_and_fill_mask(installed: Command, run_yaml: Path, tmp_path: Path) -> None:
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    short = ["train.steps=2", "optimizer.warmup_steps=1", "train.eval_every=null"]
    overrides = [f"train.run_dir={run_dir}", *short, "parallel.engine=plain"]
    installed("megatron-deberta", "pretrain", str(run_yaml), *overrides)
    assert (run_dir / "checkpoints/step_00000002/COMMITTED").exists()
    convert = ["--checkpoint", str(run_dir), "--to", "hf", "--output", str(exported)]
    installed("megatron-deberta", "convert", *convert)
    text = "The value is [MASK]."
    assert "[MASK]" in installed("megatron-deberta", "fill-mask", str(exported), text)
