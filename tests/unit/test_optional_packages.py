"""Every module is imported, and every command starts, with and without the optional packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_deberta.cli.main import COMMANDS, GROUPS

ROOT = Path(__file__).parents[2]
# Kernels and the programs that compile them, which are the only ones to import Triton
COMPILED = {
    "benchmarks.attention.compiled_kernels",
    "benchmarks.lib.compiling",
    "benchmarks.step.compiled_kernels",
    *(
        f"megatron_deberta.ops.triton.{name}"
        for name in (
            "backend", "consecutive", "cross_entropy", "gathered", "gelu", "launch", "layer_norm",
            "tables", "tiles",
        )
    ),
}  # fmt: skip
# Peers that benchmarks compare with, libraries that ``use_fast_attention`` supports, loggers,
# executors, drawing, ONNX, and those of text processing, without which a machine can train
OPTIONAL = (
    "triton", "flash_attn", "flashdeberta", "disentangled_flash", "einops", "liger_kernel",
    "apex", "amp_C", "kernels", "pynvml",
    "wandb", "tensorboard", "matplotlib", "prometheus_client", "plotext",
    "dask", "distributed", "dask_jobqueue", "mpi4py",
    "onnx", "onnxruntime", "onnxscript", "peft", "accelerate", "sentence_transformers", "gliner",
    "gigatoken", "sentencex", "sentencepiece", "nltk", "tiktoken",
)  # fmt: skip
PEERS = (
    "flash_attn", "flashdeberta", "disentangled_flash", "einops", "liger_kernel", "kernels", "apex",
)  # fmt: skip

WITHOUT = """
import importlib, json, sys
from pathlib import Path

hidden, modules, commands = json.loads(sys.stdin.read())
# Their import fails as if they were not installed.
sys.modules.update(dict.fromkeys(hidden))
failed = {}
for name in modules:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = repr(error)
from megatron_deberta.cli.main import main

for command in commands:
    try:
        code = main([command, "--help"])
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = repr(error)
    if code:
        failed[command] = code
Path(sys.argv[1]).write_text(json.dumps(failed))
"""


def modules() -> list[str]:
    """Return the modules of the package, of the benchmarks and of the tools."""
    folders = [ROOT / name for name in ("megatron_deberta", "benchmarks", "tools")]
    found = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[-1] != "__main__":
            found.append(name)
    return found


def failures(
    hidden: tuple[str, ...], names: list[str], folder: Path, *installed: Path,
    commands: list[str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Import modules and start commands, or all, in a process that has no ``hidden`` packages.

    Folders of ``installed`` packages come first on its path.
    """
    out = folder / "failed.json"
    commands = [command.name for command in COMMANDS] if commands is None else commands
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(out)],
        input=json.dumps([hidden, names, commands]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*installed, ROOT)))},
    )
    assert done.returncode == 0, done.stderr
    failed: dict[str, str] = json.loads(out.read_text())
    return failed


@pytest.mark.slow
def test_without_optional_packages_everything_but_the_kernels_is_imported(tmp_path: Path) -> None:
    names = [name for name in modules() if name not in COMPILED]
    assert "benchmarks.gpu.smoke" in names
    assert failures(OPTIONAL, names, tmp_path) == {}


@pytest.mark.nightly
def test_with_the_peers_everything_is_imported(tmp_path: Path) -> None:
    """No module fails where the packages are found.

    A machine without a GPU has no builds of them, so a package without content stands for each:
    an import from one of them fails, unless it is made when the peer is used.
    """
    packages = tmp_path / "packages"
    for peer in PEERS:
        (packages / peer).mkdir(parents=True)
        (packages / peer / "__init__.py").write_text('__version__ = "9.9.9"\n')
    assert failures((), modules(), tmp_path, packages) == {}


@pytest.mark.nightly
def test_only_the_kernels_need_triton(tmp_path: Path) -> None:
    names = sorted(COMPILED)
    assert failures((), names, tmp_path) == {}
    assert failures(("triton",), names, tmp_path).keys() == COMPILED


@pytest.mark.slow
def test_models_and_operator_need_no_extra(tmp_path: Path) -> None:
    hidden = (
        *OPTIONAL, "deepspeed", "orjson", "pydantic", "rich", "pyarrow", "rensa", "zstandard",
        "isal", "sklearn", "scipy", "seqeval",
    )  # fmt: skip
    names = [
        "model", "ops", "hf.fast_attention", "hf.modeling_megatron_deberta", "cli.main",
        "cli.doctor",
    ]  # fmt: skip
    found = failures(
        hidden,
        ["megatron_deberta", *(f"megatron_deberta.{name}" for name in names)],
        tmp_path,
        commands=["preprocess", "pretrain"],
    )
    # Commands end with a usage error, which names the extra (tests/unit/cli/test_main.py).
    assert set(found.values()) <= {2}, found


# Packages of one extra alone
TEXT = ("rensa", "isal", "zstandard", "gigatoken", "sentencex")
TRAIN = ("deepspeed", "tensorboard", "plotext", "prometheus_client")
FINETUNE = ("seqeval", "sklearn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "hidden", "folders"),
    [
        ("text", (*TRAIN, *FINETUNE), ("text", "tokenizer", "data/shards")),
        (
            "train", (*TEXT, *FINETUNE, "pyarrow"),
            ("train", "engine", "checkpoint", "cluster", "report", "hf", "objectives", "data"),
        ),
        ("finetune", TEXT, ("finetune", "evaluate", "tasks")),
        (
            "onnx", (*TRAIN, *TEXT, *FINETUNE, "pyarrow", "rich", "scipy", "matplotlib", "psutil"),
            ("hf/onnx", "tokenizer/tokenizer", "tokenizer/loading", "cli/convert"),
        ),
    ],
)  # fmt: skip
def test_commands_of_an_extra_need_no_other(
    extra: str, hidden: tuple[str, ...], folders: tuple[str, ...], tmp_path: Path
) -> None:
    prefixes = tuple(f"megatron_deberta.{folder.replace('/', '.')}" for folder in folders)
    names = [name for name in modules() if name.startswith(prefixes)]
    commands = [each.name for group in GROUPS if group.extra == extra for each in group.commands]
    assert names
    assert failures(hidden, names, tmp_path, commands=commands) == {}
