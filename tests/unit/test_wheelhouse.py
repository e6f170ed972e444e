"""The offline bundle, made from wheels that this test builds, without network access."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "without-network.md"


def make_wheel(folder, name, version, tag="py3-none-any", needs=(), module=""):
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", module)
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def make_source(folder, name, version, build_system=None):
    """Make a package without a wheel, like DeepSpeed."""
    source = folder / f"{name}-{version}"
    source.mkdir()
    if build_system is not None:
        (source / "pyproject.toml").write_text(f"[build-system]\n{build_system}\n")
    (source / "setup.py").write_text(
        f"from setuptools import setup\nsetup(name={name!r}, version={version!r}, py_modules=[])\n"
    )
    (source / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    subprocess.run(["tar", "czf", f"{source.name}.tar.gz", source.name], cwd=folder, check=True)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Build a package index with small wheels."""
    folder = tmp_path_factory.mktemp("index")
    make_wheel(folder, "alpha", "1.0", needs=["beta>=2", "torch>=2.0"])
    for version, minor in (("cp310", 17), ("cp312", 17), ("cp312", 39)):
        make_wheel(folder, "beta", f"2.{minor}", f"{version}-{version}-manylinux_2_{minor}_x86_64")
    make_wheel(folder, "torch", "2.13.0", "cp312-cp312-manylinux_2_28_x86_64")
    make_wheel(folder, "torch", "2.13.0+cu126", "cp312-cp312-manylinux_2_28_x86_64")
    make_wheel(folder, "old", "1.0")
    make_source(folder, "gamma", "3.0")
    # A package whose build tool only the index has, like seqeval.
    (folder / "built").mkdir()
    make_wheel(folder / "built", "delta", "4.0")
    built = str(folder / "built" / "delta-4.0-py3-none-any.whl")
    make_wheel(folder, "tool", "1.0", module=(
        "import shutil\n"
        f"def build_wheel(folder, *_): return shutil.copy({built!r}, folder).split('/')[-1]\n"
    ))  # fmt: skip
    make_source(folder, "delta", "4.0", 'requires = ["tool"]\nbuild-backend = "tool"')
    return folder


def wheelhouse(index, output, lines, *options):
    requirements = output.parent / f"{output.name}.txt"
    requirements.write_text("\n".join(lines) + "\n")
    environment = {
        **os.environ, "PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index),
    }  # fmt: skip
    command = [str(ROOT / "launch" / "wheelhouse.sh"), "--output", str(output)]
    command += ["--requirements", str(requirements), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def wheels(output):
    return sorted(path.name.split("-")[0] for path in output.glob("*.whl"))


@pytest.mark.slow
def test_build_tools_come_from_the_index(index, tmp_path):
    done = wheelhouse(index, tmp_path / "a", ["delta"], "--python", "3.12")
    assert done.returncode == 0, done.stderr
    assert wheels(tmp_path / "a") == ["delta"]


def test_documented_subset_covers_the_requirements():
    """Each package of requirements.txt is in the row of the GPU image: present there or brought."""
    row = re.search(r"\| a GPU image that has (.*) \| .*--only (\S+)`", DOCS.read_text())
    has = [word.split()[0] for word in re.split(", | and ", row[1])]
    known = {name.lower() for name in (*has, *row[2].split(","))}
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = {re.split("[=;]", line)[0] for line in lines if not line.startswith("#")}
    assert {name.replace("_", "-") for name in wanted} <= known
    script = (ROOT / "launch" / "gpu_carry.sh").read_text()
    carried = "".join(re.findall(r"^packages\+?=(\S+)$", script, re.M))
    assert carried == row[2]


LINES = ["alpha==1.0", "# said", "gamma", 'old==1.0; python_version < "3.12"']


@pytest.mark.slow
def test_bundle_contains_wheels_for_the_target_but_not_torch(index, tmp_path):
    done = wheelhouse(index, tmp_path / "a", LINES, "--python", "3.12")
    assert done.returncode == 0, done.stderr
    assert wheels(tmp_path / "a") == ["alpha", "beta", "gamma"]
    # Neither for another Python version nor for a newer system.
    assert (tmp_path / "a" / "beta-2.17-cp312-cp312-manylinux_2_17_x86_64.whl").exists()
    pins = (tmp_path / "a" / "requirements.txt").read_text().split()
    assert pins == ["alpha==1.0", "beta==2.17", "gamma==3.0"]
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "a")
    assert checked.returncode == 0
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
def test_markers_are_evaluated_for_the_target_and_a_subset_is_kept(index, tmp_path):
    options = ["--python", "3.10", "--only", "Beta,old"]
    lines = [line for line in LINES if line != "gamma"]
    done = wheelhouse(index, tmp_path / "a", lines, *options)
    assert done.returncode == 0, done.stderr
    assert wheels(tmp_path / "a") == ["beta", "old"]


@pytest.mark.slow
def test_torch_build_is_chosen(index, tmp_path):
    options = ["--python", "3.12", "--torch", "torch==2.13.0+cu126"]
    done = wheelhouse(index, tmp_path / "a", ["alpha==1.0"], *options)
    assert done.returncode == 0, done.stderr
    assert "torch==2.13.0+cu126" in (tmp_path / "a" / "requirements.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "options", "code", "words"),
    [
        (["nowhere==1"], [], 1, "nowhere==1 is not to be had for Python 3.12 on manylinux_2_28"),
        (["alpha==1.0"], ["--torch", "torch==9"], 1, "torch==9"),
        (["alpha==1.0"], ["--only", "beta,epsilon"], 1, "--only epsilon: not among alpha, beta"),
        (["alpha = 1"], [], 1, "is no requirement"),
        (["alpha"], ["--platform", "win_amd64"], 2, "--platform 'win_amd64' is not like"),
        (["alpha"], ["--python", "312"], 2, "--python '312' is not like 3.12"),
        (["alpha"], ["--requirements", "/none"], 1, "/none does not exist"),
        (["alpha"], ["--fast", "yes"], 2, "unknown option '--fast'"),
    ],
)
def test_refusals(index, tmp_path, lines, options, code, words):
    done = wheelhouse(index, tmp_path / "a", lines, "--python", "3.12", *options)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert not (tmp_path / "a").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_existing_output_is_not_changed(index, tmp_path):
    (tmp_path / "a").mkdir()
    done = wheelhouse(index, tmp_path / "a", LINES)
    assert done.returncode == 1
    assert "exists; name a new folder" in done.stderr
