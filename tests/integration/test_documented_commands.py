"""Every command in the bash blocks of README.md and docs/ runs as printed.

Each page has a folder with small inputs, in which its commands run in order and in this process.
Pretraining runs with ``--dry-run``, fine-tuning for one step. Commands that need SLURM, several
ranks or a GPU, and the programs of benchmarks and campaigns (see
``tests/unit/benchmarks/test_commands.py``) are only parsed.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from megatron_deberta.cli import megatron_flags
from megatron_deberta.cli.main import COMMANDS, build_parser, import_command, main
from megatron_deberta.finetune import local_runs
from megatron_deberta.finetune.search import ConfiguredRun
from tests.support.jobs import ROOT, rank_variables
from tests.support.minimal_pairs import write_pairs
from tests.support.tiny_runs import export_run

BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_YAML = re.compile(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""Files that a page shows with their names, which its commands read."""
UNMARKED = re.compile(r"^```\n(?:megatron-deberta|python -m|torchrun|launch/) ", re.MULTILINE)
PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
    if BASH.search(path.read_text())
    and path.name not in ("continued-pretraining.md", "first-walk.md")
]
"""All but the pages whose commands ``test_continued_pretraining.py`` and ``test_first_walk.py`` run
without ``--dry-run``.
"""
INPUTS = {
    "README.md": ("runs/first", "runs/xxl", "glue/SST-2"),
    "docs/config.md": ("shards/a", "shards/b"),
    "docs/data.md": (
        "data/books_text_document", "data/part-0_text_document", "data/part-1_text_document",
    ),
    "docs/finetuning.md": (
        "exports/base", "runs/large", "glue/SST-2", "glue/STS-B", "glue/MNLI", "blimp",
        "ner", "tasks/qa",
    ),
    "docs/search.md": ("exports/base", "glue/SST-2"),
    "docs/tasks.md": ("runs/own", "orders"),
    "docs/gliner.md": ("runs/quickstart/run",),
    "docs/onnx.md": ("exports/base", "runs/first", "glue/SST-2"),
    "docs/export.md": ("runs/first", "shards/corpus_text_document"),
    "docs/preprocess.md": ("tokenizer",),
    "docs/attention-maps.md": ("runs/first", "exports/base"),
    "docs/autoregressive.md": ("runs/mt", "wiki.valid.tokens"),
    "docs/retromae.md": (
        "runs/mlm", "runs/retromae", "glue/STS-B",
        "shards/train_text_document", "shards/validation_text_document",
    ),
    "docs/published-models.md": ("exports/base",),
    "docs/rtd.md": ("shards/corpus_text_document", "runs/rtd"),
    "docs/report.md": ("runs/base", "runs/large"),
    "docs/recipes.md": ("runs/stable", "runs/averaged", "shards/books_text_document"),
}  # fmt: skip
"""Runs, shards, tokenizers, labelled data that a page's commands read and no earlier one writes."""
LABELLED = {
    "glue/SST-2": ("sentence\tlabel", "index\tsentence", "a fine film\t1", "0\ta fine film"),
    "glue/MNLI": (
        "index\tsentence1\tsentence2\tgold_label", "index\tsentence1\tsentence2",
        "{}\tIt rains.\tIt is wet.\tentailment", "0\tIt rains.\tIt is wet.",
    ),
}  # fmt: skip
"""Header with and without labels, row with (``{}``: its number) and without a label."""
TRAINED = {
    "runs/rtd": ("objective.name=rtd",),
    "runs/mt": ("objective.name=mlm+ar",),
    "runs/retromae": ("objective.name=retromae",),
    "runs/averaged": ("optimizer.ema_decay=0.999",),
}
"""Runs with other settings."""


def write_tagged(folder: Path) -> None:
    """Write the files of a tagger: eight sentences each."""
    folder.mkdir()
    for split in ("train", "dev"):
        sentence = "Ship O\n3 B-QTY\ncrates I-QTY\nof O\npears B-ITEM\n. O\n\n"
        (folder / f"{split}.txt").write_text(sentence * 8)


def write_entities(folder: Path) -> None:
    """Write WNUT-17's files for training and validation: eight sentences each."""
    folder.mkdir()
    for name in ("wnut17train", "emerging.dev"):
        (folder / f"{name}.conll").write_text("Ada\tB-person\nsings\tO\n\n" * 8)


def write_scored(folder: Path) -> None:
    """Write the files of pairs with scores: eight in each."""
    folder.mkdir()
    rows = [f"{n}\tA man sings.\tA person is singing.\t{n / 2}" for n in range(8)]
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text(
            "\n".join(["index\tsentence1\tsentence2\tscore", *rows, ""])
        )


def write_policies(folder: Path) -> None:
    """Write PolicyQA's files: a policy for training, and one for validation."""
    folder.mkdir()
    for split, title in (("dev", "mlb.mlb.com"), ("test", "fool.com")):
        paragraphs = [
            {"context": f"{title} {n}.", "qas": [{"question": f"Is it {n}?", "id": f"{title}-{n}",
             "answers": [{"text": title, "answer_start": 0}]}]}
            for n in range(3)
        ]  # fmt: skip
        content = {"data": [{"title": title, "paragraphs": paragraphs}]}
        (folder / f"policyqa.{split}.json").write_text(json.dumps(content))


WRITERS = {
    "glue/STS-B": write_scored,
    "blimp": write_pairs,
    "ner": write_entities,
    "orders": write_tagged,
    "tasks/qa": write_policies,
    "wiki.valid.tokens": lambda path: path.write_text(" \n = A title = \n \n Some words . \n"),
}
"""Functions that write an input."""
ONE_STEP = (
    "train.steps=1",
    "optimizer.warmup_steps=0",
    "train.eval_every=null",
    "data.num_workers=0",
    "parallel.engine=plain",
)
ONE_CELL = (
    "sample=1",
    "seeds=2",
    "finetune.epochs=1",
    "optimizer.warmup_steps=0",
    "train.device=cpu",
    "parallel.engine=plain",
)
SMALLER = {"--vocab-size": "300", "--average": "1"}
"""Values of options that would need a large corpus or a longer run."""
DRY_RUN = ("pretrain", "submit")
PARSED_ONLY = ("launch", "cancel", "doctor")
DOCUMENTS = 120


@pytest.fixture(scope="module")
def run_dir(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps; return the run folder."""
    folder = tmp_path_factory.mktemp("documented") / "run"
    train(run_yaml, folder)
    return folder


def train(run_yaml: Path, folder: Path, *overrides: str) -> None:
    """Train two steps."""
    settings = ("train.exit_step=2", "parallel.engine=plain", "train.eval_every=null")
    # As in configs/runs/small.yaml, which README's command trains.
    workers = ("data.num_workers=0", "log.level=warning", "model.vocab_size=auto")
    command = ["pretrain", str(run_yaml), f"train.run_dir={folder}", *settings, *workers]
    assert main([*command, *overrides]) == 0


@pytest.fixture
def folder(
    request: pytest.FixtureRequest,
    run_yaml: Path,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Prepare the folder of a page as the working directory."""
    for name in ("configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_corpus(tmp_path / "corpus", run_yaml.parent / "docs.jsonl")
    for name, content in NAMED_YAML.findall(
        (ROOT / request.node.callspec.params["page"]).read_text()
    ):
        (tmp_path / name).write_text(content)
    text = run_yaml.read_text().replace("global_batch_size: 8", "global_batch_size: 1024")
    (tmp_path / "RUN.yaml").write_text(text)
    for name in INPUTS.get(request.node.callspec.params["page"], ()):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name in TRAINED:
            train(run_yaml, target, *TRAINED[name])
        elif name.startswith("runs/"):
            shutil.copytree(run_dir, target)
            (target / "logs" / "1.0").mkdir(parents=True)
            (target / "logs" / "1.0" / "rank_0.log").write_text("step 1/60\n")
        elif name in WRITERS:
            WRITERS[name](target)
        elif name in LABELLED:
            write_labelled(target, *LABELLED[name])
        elif name.startswith("exports/"):
            export_run(run_dir, target)
        elif name == "tokenizer":
            shutil.copytree(run_yaml.parent / name, target)
        else:
            for source in run_yaml.parent.glob("docs_text_document.*"):
                shutil.copy(source, f"{target}{source.name.removeprefix('docs_text_document')}")
    monkeypatch.setattr(local_runs, "run_all", run_all_here)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write_corpus(folder: Path, documents: Path) -> None:
    """Write two compressed files of documents."""
    folder.mkdir()
    lines = documents.read_text().splitlines(keepends=True)[:DOCUMENTS]
    for number in range(2):
        with gzip.open(folder / f"{number}.jsonl.gz", "wt") as stream:
            stream.writelines(lines[number::2])


def run_all_here(runs: list[ConfiguredRun], slots: Any, on_end: Any, *_: Any) -> bool:
    """Run the runs of a search one after another in this process."""
    for run in runs:
        assert main(["pretrain", str(run.write_config())]) == 0
        on_end(local_runs.Outcome(run, 0, 1.0))
    return True


def write_labelled(folder: Path, header: str, test_header: str, row: str, unlabelled: str) -> None:
    """Write the files of a GLUE task: eight labelled rows per split, one without label."""
    folder.mkdir()
    for split in ("train", "dev", "dev_matched", "dev_mismatched"):
        lines = [header, *(row.format(number) for number in range(8)), ""]
        (folder / f"{split}.tsv").write_text("\n".join(lines))
    for split in ("test", "test_matched", "test_mismatched"):
        (folder / f"{split}.tsv").write_text("\n".join([test_header, unlabelled, ""]))


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command of a page, after the expansion of file names."""
    for block in BASH.findall((ROOT / page).read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words: list[str] = []
            for word in shlex.split(line, comments=True):
                if word == "&&":
                    yield words
                    words = []
                else:
                    is_pattern = "*" in word and "'" not in line
                    words += sorted(glob.glob(word)) or [word] if is_pattern else [word]
            if words:
                yield words


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run or parse a command."""
    program, *arguments = words
    if program == "megatron-deberta":
        check_command(arguments)
    elif program == "torchrun":
        launcher = get_args_parser().parse_args(arguments)
        assert (launcher.module, launcher.training_script) == (True, "megatron_deberta")
        with monkeypatch.context() as patch:
            for name, value in rank_variables(0, int(launcher.nproc_per_node), 29500).items():
                patch.setenv(name, value)
            check_command(launcher.training_script_args)
    elif program in ("srun", "mpirun"):
        check_command(arguments[arguments.index("megatron-deberta") + 1 :])
    elif program == "sbatch":
        script = next(word for word in arguments if not word.startswith("-"))
        assert (ROOT / script).exists()
        check_command(["pretrain", *arguments[arguments.index(script) + 1 :]])
    elif words[:2] == ["python", "tools/preprocess_data.py"]:
        assert megatron_flags.main(arguments[1:]) == 0
    elif program == "python":
        assert arguments[0] == "-m"
        module = ROOT.joinpath(*arguments[1].split("."))
        is_ours = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        assert is_ours or arguments[1] in sys.stdlib_module_names, arguments[1]
    elif "/" in program:
        assert os.access(ROOT / program, os.X_OK), program
        for option in (word for word in arguments if word.startswith("--")):
            assert option in (ROOT / program).read_text(), f"{program} has no option {option}"
    else:
        assert program in ("source", "pip", "grep", "docker", "git", "cd"), (
            f"unknown program {program}"
        )


def check_command(arguments: list[str]) -> None:
    """Run a subcommand of ``megatron-deberta``, or parse its arguments."""
    for option, value in SMALLER.items():
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
    name, *options = arguments
    is_following = name == "logs" and "-f" in options
    is_elsewhere = name in ("status", "logs") and not Path(options[0]).exists()
    if name in PARSED_ONLY or is_following or is_elsewhere or "--ranks" in options:
        command = next(command for command in COMMANDS if command.name == name)
        build_parser(command, import_command(command)).parse_intermixed_args(options)
        return
    if name in DRY_RUN and "--dry-run" not in options:
        # The cluster's torch and paths are not here.
        arguments = [*arguments, "--dry-run", *(["--no-check"] if name == "submit" else [])]
    if name in ("finetune", "finetune-checkpoints") and "--save-config" not in options:
        arguments = [*arguments, *ONE_STEP]
    if name == "convert" and "onnx" in options:
        arguments = [*arguments, "--no-timing"]
    if name == "search" and "--dry-run" not in options:
        there = ["--dry-run", "--no-check"] if "--cluster" in options else []
        arguments = [*arguments, *ONE_CELL, *there]
    assert main(arguments) == 0, " ".join(arguments)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page == "README.md" else pytest.mark.slow) for page in PAGES],
)
def test_commands_run_as_printed(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if page == "docs/onnx.md":
        pytest.importorskip("onnxruntime", reason="extra [onnx] is not installed")
    for words in commands(page):
        check(words, monkeypatch)


def test_blocks_of_commands_are_marked_as_bash() -> None:
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        assert not UNMARKED.search(path.read_text()), path
