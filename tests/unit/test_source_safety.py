"""No Python file of the project calls functions that can execute data as code.

Exceptions are listed in ``ALLOWED`` with a reason; an unused exception fails, too. SECURITY.md
describes what these rules protect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron_deberta", "tools", "launch", "benchmarks", "tests")
FILES = [
    ROOT / "setup.py",
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))),
]

MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "jsonpickle", "joblib", "shelve",
    "marshal", "xmlrpc", "telnetlib",
}  # fmt: skip
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execl", "os.execv",
    "os.execve", "os.execvp", "os.spawnl", "os.spawnv", "pty.spawn", "commands.getoutput",
    "subprocess.getoutput", "subprocess.getstatusoutput", "torch.load", "torch.save",
    "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "yaml.load_all", "yaml.unsafe_load_all", "yaml.full_load_all", "tempfile.mktemp",
    "shutil.unpack_archive",
}  # fmt: skip
METHODS = {
    # DeepSpeed's checkpoints are pickles; members of archives are streamed, never extracted.
    "save_checkpoint", "load_checkpoint", "extractall",
    # These functions use pickle.
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip

ALLOWED = {
    ("benchmarks/gpu/first_contact.py", "archive.extractall"): (
        "compiled kernels that an earlier start on such a machine packed; nothing leaves the folder"
    ),
    ("megatron_deberta/cli/main.py", "os.execve"): (
        "the command itself with its own arguments, in UTF-8 mode"
    ),
    ("megatron_deberta/hf/legacy_bin.py", "torch.load"): (
        "a pickled release, asked for by a flag, with its SHA-256, in a process of its own"
    ),
    ("megatron_deberta/config/yaml_reader.py", "yaml.load"): (
        "with a SafeLoader that also refuses tags, aliases and duplicate keys"
    ),
    ("megatron_deberta/hf/verify.py", "trust_remote_code=True"): (
        "runs the modeling file that the export has just written from this package"
    ),
}
"""File and call -> reason."""
ALLOWED_IN_TESTS = {
    ("tests/parity/test_export.py", "trust_remote_code=True"): "runs what it has just exported",
    ("tests/parity/test_task_export.py", "trust_remote_code=True"): (
        "runs what it has just exported"
    ),
    ("tests/integration/test_finetuned_exports.py", "exec"): "runs the line that convert prints",
    ("tests/support/releases.py", "torch.save"): "writes models as they are published",
    ("tests/parity/test_fast_attention.py", "import pickle"): "copies a model as users do",
    ("tests/parity/test_import.py", "torch.save"): "makes a pickled release to import",
    ("tests/parity/test_published_onnx.py", "torch.save"): "makes a pickled release to export",
    ("tests/support/ranks.py", "import pickle"): "both ends of the pipe are the test's own",
    ("tests/judges/test_gliner_page.py", "exec"): "runs the code of the page",
    ("tests/unit/hf/test_convert.py", "exec"): "runs the lines that convert has just printed",
    ("tests/unit/hf/test_convert.py", "torch.save"): "writes a generator as it is published",
    ("tests/unit/hf/test_hf_import.py", "torch.save"): "makes pickles to refuse",
    ("tests/unit/data/test_data_loader.py", "import pickle"): "copies a dataset as workers do",
    ("tests/unit/data/test_indexed.py", "import pickle"): "copies a reader as workers do",
}


def names_of(tree: ast.AST) -> dict[str, str]:
    """Map imported names to their origin: ``np`` -> ``numpy``, ``load`` -> ``torch.load``."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, names)
        return f"{before}.{node.attr}" if before else f"?.{node.attr}"
    return ""


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return line and name of every forbidden call."""
    names = names_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                if module.split(".")[0] in MODULES:
                    yield node.lineno, f"import {module}"
        if isinstance(node, (ast.Attribute, ast.Name)) and dotted(node, names) in (
            "torch.load",
            "torch.save",
        ):
            # Also as an argument.
            yield node.lineno, dotted(node, names)
        if isinstance(node, ast.Call):
            yield from dangerous_call(node, names)


def dangerous_call(node: ast.Call, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    called = dotted(node.func, names)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if called in CALLS or called.rpartition(".")[2] in METHODS:
        yield node.lineno, called
    if called == "torch.load" and not is_constant(keywords.get("weights_only"), True):
        yield node.lineno, "torch.load without weights_only=True"
    if called == "numpy.load" and not is_constant(keywords.get("allow_pickle"), False):
        yield node.lineno, "numpy.load without allow_pickle=False"
    for risky in ("shell", "trust_remote_code"):
        if risky in keywords and not is_constant(keywords[risky], False):
            yield node.lineno, f"{risky}={ast.unparse(keywords[risky])}"
    if called.startswith("numpy.") and is_constant(keywords.get("allow_pickle"), True):
        yield node.lineno, f"{called} with allow_pickle=True"


def folder_of(path: Path) -> str:
    """Return the first two folders of a file: a test per file would take longer to schedule."""
    return "/".join(path.relative_to(ROOT).parent.parts[:2])


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(folder, marks=pytest.mark.slow if folder.startswith("tests") else ())
        for folder in sorted({folder_of(path) for path in FILES})
    ],
)
def test_no_call_executes_data(folder: str) -> None:
    exceptions = {**ALLOWED, **ALLOWED_IN_TESTS}
    for path in (path for path in FILES if folder_of(path) == folder):
        relative = path.relative_to(ROOT).as_posix()
        for line, name in dangers(ast.parse(path.read_text(encoding="utf-8"))):
            assert (relative, name) in exceptions, (
                f"{relative}:{line}: {name} is refused; see SECURITY.md"
            )


@pytest.mark.parametrize(("file", "call"), [*ALLOWED, *ALLOWED_IN_TESTS])
def test_every_exception_is_needed(file: str, call: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert call in {name for _, name in dangers(tree)}, "take it out of the list"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import _pickle as p",
        "eval(text)",
        "from os import system\nsystem(text)",
        "import subprocess as s\ns.run(text, shell=True)",
        "import subprocess\nsubprocess.run(text, shell=flag)",
        "import torch as t\nt.load(path, weights_only=True)",
        "from torch import load as read\nread(path)",
        "import torch\nreader = torch.load",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=flag)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "engine.save_checkpoint(folder)",
        "archive.extractall(folder)",
        "import torch.distributed as dist\ndist.all_gather_object(out, x)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_rules_detect_dangerous_calls(text: str) -> None:
    assert list(dangers(ast.parse(text)))


def test_rules_allow_other_calls() -> None:
    harmless = (
        "import numpy as np\nimport re, subprocess, torch\nnp.load(path, allow_pickle=False)\n"
        "model.eval()\nre.compile('x')\nsubprocess.run([program, text], check=True)\n"
        "torch.compile(function)\n"
    )
    assert not list(dangers(ast.parse(harmless)))


def test_shell_scripts_do_not_evaluate_text() -> None:
    for path in [*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch"), ROOT / "tests/run.sh"]:
        words = path.read_text(encoding="utf-8").split()
        assert "eval" not in words, path
        assert "-c" not in [
            after
            for before, after in zip(words, words[1:], strict=False)
            if before in ("bash", "sh")
        ], path
