"""The command: its table, its help, its exit codes, what some commands print."""

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_deberta import __version__, errors
from megatron_deberta.cli import main as cli
from megatron_deberta.cli.arguments import FORMER_OPTIONS
from megatron_deberta.cli.evaluate import describe_metrics

NAMES = [command.name for command in cli.COMMANDS]


@pytest.mark.parametrize("command", cli.COMMANDS, ids=NAMES)
def test_every_entry_of_the_table_works(
    command: cli.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command.name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: megatron-deberta {command.name}" in shown
    assert f"megatron-deberta {command.name} " in shown.partition("options:")[2], (
        f"the help of {command.name} ends without an example"
    )


def all_options() -> dict[str, dict[str, argparse.Action]]:
    """Return the options of all commands and subcommands: name of the command to its action."""
    found: dict[str, dict[str, argparse.Action]] = {}
    for command in cli.COMMANDS:
        for form, parser in cli.command_parsers(command, cli.import_command(command)).items():
            for action in parser._actions:
                for option in action.option_strings:
                    found.setdefault(option, {})[f"{command.name} {form}".strip()] = action
    return found


def test_an_option_means_the_same_in_every_command() -> None:
    """Its type, number of values and placeholder are equal; only choices may be fewer."""
    # Where the result goes: a file or several, a folder, or the beginning of names.
    may_differ = {"--output": ("nargs", "type")}
    for option, actions in all_options().items():
        seen = {
            tuple(
                getattr(getattr(action, name), "__name__", getattr(action, name))
                for name in may_differ.get(option, ("nargs", "type", "metavar"))
            )
            for action in actions.values()
        }
        assert len(seen) == 1, f"{option} differs between {sorted(actions)}: {seen}"
        choices = [set(action.choices) for action in actions.values() if action.choices]
        assert all(one <= max(choices, key=len) for one in choices), option


def test_one_name_for_one_thing() -> None:
    """``--ranks``: training processes; ``--workers``: processes or threads of a text command."""
    options = all_options()
    synonyms = {
        "--ranks": "--world-size --num-ranks --nproc --nproc-per-node --processes --gpus",
        "--workers": "--num-workers --threads --procs",
        "--jobs": "",
        "--model": "--model-path --model-dir",
        "--checkpoint": "--ckpt --checkpoint-dir",
        "--seeds": "--num-seeds",
        "--seed": "--random-seed",
        "--output": "--out --output-dir --output-file --output-path",
        "--max-new-tokens": "--tokens --max-tokens",
        "--max-restarts": "--restarts --retries",
        "--mfu": "--achieved --utilization",
    }
    for name, others in synonyms.items():
        assert name in options
        assert not options.keys() & set(others.split()), f"use {name}"
    assert set(options["--jobs"]) == {"search"}, "use --workers"
    for former, new in FORMER_OPTIONS.items():
        command, _, option = former.rpartition(" ")
        assert new in options
        assert option not in options or command not in options[option], f"{former} is now {new}"
        assert command or option not in options


@pytest.mark.parametrize("name", ["inspect", "evaluate"])
def test_subcommands_have_help_of_their_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = next(command for command in cli.COMMANDS if command.name == name)
    forms = cli.command_parsers(command, cli.import_command(command))
    assert len(forms) > 1
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    overview = capsys.readouterr().out
    for form in forms:
        with pytest.raises(SystemExit) as caught:
            cli.main([name, form, "--help"])
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert f"usage: megatron-deberta {name} {form} " in shown
        assert f"  megatron-deberta {name} {form} " in shown.partition("Examples:")[2]
        assert f"\n  {form} " in overview


def test_the_former_spelling_of_evaluate_works_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["no_task", "--model", "m", "--data", "d d"]
    assert cli.main(["evaluate", "--debug", "task", *arguments]) == errors.EXIT_USAGE
    assert "Traceback" in capsys.readouterr().err
    assert cli.main(["evaluate", *arguments]) == errors.EXIT_USAGE
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.endswith("warning: write evaluate task no_task --model m --data 'd d'")
    assert "no task 'no_task'" in error or "m: " in error


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megatron-deberta {__version__}\n"
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert command.name in shown
        assert command.help in shown


def test_help_and_version_cost_no_torch() -> None:
    probe = (
        "import sys; from megatron_deberta.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'omegaconf', 'numpy', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_output_lacks_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    run = tmp_path / "run.yaml"
    run.write_text("train: {run_dir: K\u00f6ln \u6771\u4eac}", encoding="utf-8")
    assert cli.main(["pretrain", str(run), "--dry-run"]) == 0
    sys.stdout.flush()
    shown = "run_dir: K\u00f6ln \u6771\u4eac\n".encode(encoding, "replace")
    assert shown in raw.getvalue()


def test_arguments_of_any_language_need_no_locale() -> None:
    """With ASCII names of files, the command starts itself again in UTF-8 mode, once."""
    command = [sys.executable, "-m", "megatron_deberta", "status", "dés/modèle"]
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    for more in ({}, {"PYTHONIOENCODING": "ascii"}):
        environment = {**os.environ, **settings, **more}
        done = subprocess.run(command, env=environment, capture_output=True)
        assert done.returncode == errors.EXIT_USAGE
        assert done.stderr.count(b"\n") == 1
        name = "dés/modèle".encode() if not more else rb"d\xe9s/mod\xe8le"
        assert done.stderr.startswith(b"megatron-deberta: error: " + name + b": no such folder")


def test_text_that_the_encoding_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Python was started in another encoding by its own option."""
    error = UnicodeEncodeError("ascii", "dés", 1, 2, "ordinal not in range(128)")
    monkeypatch.setattr(cli, "import_command", lambda _: Subcommand(error))
    assert cli.main(["plan"]) == errors.EXIT_USAGE
    assert capsys.readouterr().err == (
        "megatron-deberta: error: '\\xe9' cannot be written in ascii, the encoding of this "
        "environment; set PYTHONUTF8=1, or LC_ALL to a locale with UTF-8\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "required: COMMAND\n"),
        ("fly", "no command 'fly'; --help lists them"),
        ("pretrian", "no command 'pretrian'; did you mean pretrain?"),
        ("--fly", "COMMAND"),
    ],
)
def test_wrong_usage_exits_2(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments.split())
    assert caught.value.code == errors.EXIT_USAGE
    shown = capsys.readouterr().err
    assert "usage: megatron-deberta" in shown
    assert said in shown


def test_help_shows_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["split", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "seed of the hash (default: 0)" in shown
    assert "(default: 0.05, as in the paper)" in shown
    assert "(default: 0.05)" not in shown


class Subcommand:
    """A stand-in for a module of ``cli/``, which raises or returns what it is given.

    megatron-deberta probe
    """

    def __init__(self, outcome: BaseException | int) -> None:
        self.outcome = outcome

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", nargs="?")

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (0, 0, ""),
        (errors.EXIT_REQUEUE, 75, ""),
        (errors.ConfigError("train.steps=0\n is wrong"), 2, "train.steps=0 is wrong"),
        (errors.TopologyError("3 ranks"), 2, "3 ranks"),
        (errors.DataError("a.jsonl:3: not JSON"), 1, "a.jsonl:3: not JSON"),
        (FileNotFoundError(2, "No such file or directory", "x"), 1, "x: No such file or directory"),
        (NotADirectoryError(20, "Not a directory", "a/b"), 2, "a/b: Not a directory"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (OSError("odd"), 1, "odd"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line_and_a_code(
    outcome: BaseException | int,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "import_command", lambda _: Subcommand(outcome))
    assert cli.main([NAMES[0], "file"]) == code
    expected = f"megatron-deberta: error: {message}\n" if message else ""
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("argv", [["--debug", NAMES[0]], [NAMES[0], "--debug"]])
def test_debug_shows_the_traceback_too(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "import_command", lambda _: Subcommand(errors.DataError("bad")))
    assert cli.main(argv) == errors.EXIT_FAILURE
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("megatron-deberta: error: bad\n")


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "import_command", lambda _: Subcommand(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main([NAMES[0]])


def test_a_reader_that_left_is_no_error() -> None:
    probe = (
        "import sys; from megatron_deberta.cli import main as cli\n"
        "class Talker:\n"
        "    def add_arguments(self, parser): pass\n"
        "    def run(self, args):\n"
        "        while True: print('x' * 1000)\n"
        "cli.import_command = lambda _: Talker()\n"
        f"sys.exit(cli.main(['{NAMES[0]}']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == cli.EXIT_PIPE_CLOSED


def test_accuracies_of_many_groups_are_printed_as_a_range() -> None:
    few = {"loss": 0.5, "accuracy": 0.25, "accuracy_a": 0.0, "accuracy_b": 0.5}
    assert describe_metrics(few).splitlines() == [
        "loss                 0.5000", "accuracy             0.2500",
        "accuracy_a           0.0000", "accuracy_b           0.5000",
    ]  # fmt: skip
    many = {"accuracy": 0.5, **{f"accuracy_{number}": number / 200 for number in range(200)}}
    assert describe_metrics(many).splitlines() == [
        "accuracy             0.5000",
        "200 groups: from 0.0000 (0) to 0.9950 (199); --output FILE has all",
    ]


@pytest.mark.parametrize(
    ("script", "program"),
    [
        ("pretrain", "megatron-deberta pretrain"),
        ("preprocess_data", "tools/preprocess_data.py"),
        ("train_tokenizer", "megatron-deberta train-tokenizer"),
        ("convert_checkpoint", "megatron-deberta convert"),
    ],
)
def test_tools_call_the_command(script: str, program: str) -> None:
    path = Path(__file__).parents[3] / "tools" / f"{script}.py"
    done = subprocess.run(
        [sys.executable, str(path), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(path.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: {program} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # What is missing, and only that
        ("pretrain", "error: the following arguments are required: RUN.yaml; see megatron-deberta"),
        ("verify", "no shard given"),
        # Unknown options name the one that may be meant
        ("deduplicate --inptu a --output b", "required: --input; did you mean --input?"),
        ("launch run.yaml --nodes 16", "required: --ranks; see megatron-deberta launch"),
        ("deduplicate --input a --outptu=b --output c", "--outptu=b; did you mean --output?"),
        ("pretrain small.yaml --steps 100", "--steps 100; set train.steps=100; see"),
        ("launch a.yaml --ranks 2 --steps=7 log.every=1", "log.every=1; set train.steps=7; see"),
        ("launch a.yaml --ranks 2 --learning-rate", "; set optimizer.learning_rate=VALUE; see"),
        ("pretrain a.yaml --dry-rnu", "--dry-rnu; did you mean --dry-run?"),
        ("verify a --steps 7", "--steps 7; see"),
        # Numbers
        ("verify shard --workers 0", "argument --workers: 0 must be at least 1"),
        ("verify shard --workers two", "argument --workers: invalid int value: 'two'"),
        # Options without effect
        ("config", "give one of RUN.yaml, to print what it resolves to, --list"),
        ("config --list trains", "--list trains: must be one of checkpoint, cluster, "),
        ("config --runs --models", "give one of RUN.yaml"),
        ("config --models --markdown", "--markdown is for --list"),
        ("config runs/base --markdown", "--markdown is for --list"),
        ("ensemble . --split dev", "--split needs --output or --leaderboard"),
        ("finetune sst2 --model m --data d --max-restarts 3", "--max-restarts needs --ranks"),
        ("finetune sst2 --model m --data d --dry-run --ranks 2", "--ranks starts training"),
        ("finetune s --model m --data d --dry-run --save-config r", "--save-config writes a file"),
        (
            "finetune sst2 --model m --data d --save-config r.yaml --allow-config-change",
            "--allow-config-change starts training",
        ),
        (
            "deduplicate --input x --output y --exact-only --threshold 0.7",
            "--threshold is for near",
        ),
        ("deduplicate --input x --output y --exact-only --ngram 5", "--ngram is for near"),
        ("split --input x --output y --nodes 2", "--nodes is for --estimate"),
        ("split --input x --output y --dask-jobs 1", "--dask-jobs is for --dask slurm"),
        ("split --input x --output y --executor mpi --array-task 0/2", "is not for --executor mpi"),
        ("inspect data x --top 3", "--top 3; see megatron-deberta inspect data --help"),
        ("inspect shards x --statistics 3", "--statistics 3; see megatron-deberta inspect shards"),
        ("inspect rows x", "invalid choice: 'rows' (choose from"),
        ("evaluate", "required: SUBCOMMAND; see megatron-deberta evaluate --help"),
        (
            "evaluate task s --model m --data d --limit 3",
            "--limit 3; see megatron-deberta evaluate",
        ),
        ("evaluate task blimp --model m --data d", "write evaluate blimp before the options"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.split()) == errors.EXIT_USAGE
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "new", "said"),
    [
        ("plan RUN --achieved 40", "--mfu", "RUN: "),
        ("launch RUN --ranks=1 --restarts=-1", "--max-restarts", "--max-restarts: -1 must be"),
        ("generate RUN text --tokens 0", "--max-new-tokens", "--max-new-tokens: 0 must be"),
        ("plan RUN --world-size 0", "--ranks", "--ranks: 0 must be at least 1"),
        ("verify x --jobs 0", "--workers", "--workers: 0 must be at least 1"),
        ("submit RUN --cluster dgx2 --links=0", "--max-attempts", "--max-attempts: 0 must be"),
        ("submit RUN --cluster dgx2 --least-nodes=1", "--min-nodes", "RUN: "),
    ],
)
def test_former_options_work_with_a_warning(
    arguments: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments.split()) == errors.EXIT_USAGE
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.endswith(f" is now {new}")
    assert said in error


@pytest.mark.parametrize(
    ("command", "extra"), [("preprocess", "text"), ("pretrain", "train"), ("predict", "finetune")]
)
def test_a_missing_package_names_its_extra(
    command: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(command: cli.Command) -> None:
        raise ModuleNotFoundError("No module named 'orjson'", name="orjson")

    monkeypatch.setattr(cli, "import_command", missing)
    assert cli.main([command]) == 2
    error = capsys.readouterr().err
    assert "orjson" in error
    assert f"pip install 'megatron-deberta[{extra}]'" in error


def test_fill_mask_without_prior_needs_no_package_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_deberta.cli.fill_mask import read_penalty

    monkeypatch.setitem(sys.modules, "megatron_deberta.data.build", None)
    model = SimpleNamespace(training_data=())
    assert read_penalty(model, 0.0, []) is None  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError):
        read_penalty(model, 0.5, ["shard"])  # type: ignore[arg-type]
