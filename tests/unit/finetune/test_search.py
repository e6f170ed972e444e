"""Searches: config, cells, results and table, and the runs of a machine."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import signal
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_deberta.checkpoint.layout import checkpoints_dir
from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.files import FileLock
from megatron_deberta.finetune.local_runs import (
    LOG_FILE,
    Outcome,
    StopRequest,
    run_all,
    slot_environments,
)
from megatron_deberta.finetune.search import (
    RESULT_FILE,
    Cell,
    ConfiguredRun,
    SearchConfig,
    best_cell,
    collect,
    configure_runs,
    format_table,
    list_cells,
    load_search,
    prune,
    read_result,
    write_results,
)
from megatron_deberta.tasks.task import load_task
from tests.support.tiny_task import MODEL, write_finished_run, write_task

GRID = {"optimizer.learning_rate": [1e-3, 3e-3], "model.head_dropout": [0, 0.1]}


@pytest.fixture
def search_file(tmp_path: Path) -> Path:
    """A search of four cells and three seeds."""
    data = write_task(tmp_path / "data")
    values = {
        "task": str(data / "task.yaml"), "model": str(MODEL), "data": str(data), "seeds": 3,
        "output": str(tmp_path / "out"), "grid": {**GRID, "train.steps": 2, "train.device": "cpu"},
    }  # fmt: skip
    path = tmp_path / "search.yaml"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture
def search(search_file: Path) -> SearchConfig:
    return load_search(str(search_file))


@pytest.fixture
def runs(search: SearchConfig) -> list[ConfiguredRun]:
    return configure_runs(search, load_task(search.task), open_source_model(MODEL))


@pytest.fixture
def refused(search_file: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that starts the search with arguments, and returns its error."""

    def start(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["search", str(search_file), *arguments]) == EXIT_USAGE
        return capsys.readouterr().err

    return start


def finish(run: ConfiguredRun, score: float) -> None:
    """Write the result of a run."""
    run.folder.mkdir(parents=True, exist_ok=True)
    result = {
        "split": "dev", "metric": "accuracy", "score": score, "step": 2, "steps": 2, "metrics": {},
    }  # fmt: skip
    (run.folder / RESULT_FILE).write_text(json.dumps(result))


def test_text_of_a_search_stands_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "search.yaml"
    path.write_text(
        "task: 0123\nmodel: 2024_1\ndata: 12:30\nsettings: no\n"
        "grid: {log.wandb: 555_1, optimizer.freeze: [no, 1e5], finetune.epochs: [1, 1_0]}"
    )
    search = load_search(str(path), ["tokenizer=0x10", "finetune.cache=2024_2", "output=yes"])
    assert (search.task, search.settings) == ("0123", "no")
    names = [Path(each).name for each in (search.model, search.data, search.tokenizer)]
    assert [*names, Path(search.output).name] == ["2024_1", "12:30", "0x10", "yes"]
    assert search.grid == {
        "log.wandb": "555_1", "optimizer.freeze": ["no", "1e5"], "finetune.epochs": [1, 10],
        "finetune.cache": "2024_2",
    }  # fmt: skip
    for wrong in ("seeds=010", "optimizer.warmup_steps=[1:30]"):
        with pytest.raises(ConfigError, match="decimal"):
            load_search(str(path), [wrong])


@pytest.mark.parametrize(
    ("name", "rates", "batches", "dropout", "count"),
    [
        ("base", {1.5e-5, 2e-5, 3e-5, 4e-5}, {16, 32, 48, 64}, {0, 0.1, 0.15}, 192),
        ("large", {5e-6, 8e-6, 9e-6, 1e-5}, {16, 32, 48, 64}, {0, 0.1, 0.15}, 192),
        ("1.5b", {1e-6, 3e-6, 5e-6}, {16, 32, 64}, {0, 0.15, 0.3}, 108),
    ],
)
def test_grids_are_those_of_the_papers_table_9(
    name: str, rates: set[float], batches: set[int], dropout: set[float], count: int
) -> None:
    given = ("task=mnli", "model=m", "data=d")
    search = load_search(f"configs/searches/paper_{name}.yaml", given)
    cells = list_cells(search, load_task("mnli"))
    expected = {
        "optimizer.learning_rate": rates,
        "train.global_batch_size": batches,
        "model.head_dropout": dropout,
        "optimizer.warmup_steps": {50, 100, 500, 1000},
    }
    assert {key: {cell.values[key] for cell in cells} for key in expected} == expected
    assert (len(cells), search.seeds) == (count, (1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sedes=3", "no key 'sedes'; did you mean seeds?"),
        ("seeds=[1,1]", "seeds=[1, 1]: give different seeds"),
        ("seeds=many", "seeds='many'"),
        ("select=best", "select='best'"),
        ("train.seed=3", "grid.train.seed: set the key seeds instead"),
        ("model.head_dropout=[]", "grid.model.head_dropout=[]: give different values"),
        ("optimizer.learning_rate=[1e-5,1.0e-5]", "give different values"),
        ("optimizer.learning_rat=[1e-5]", "optimizer.learning_rat"),
        ("settings=paper", "settings='paper': task tiny has none"),
        ("data=", "data is missing"),
        ("finetune.epochs=2", "grid has train.steps and finetune.epochs"),
        ("nothing", "'nothing' is not key=value"),
    ],
)
def test_wrong_keys_and_values_are_errors_of_one_line(
    search_file: Path, argument: str, message: str, refused: Callable[..., str]
) -> None:
    error = refused(argument)
    assert message in error
    assert error.count("\n") == 1
    assert not (search_file.parent / "out").exists()


def test_runs_have_the_values_of_their_cells(
    search: SearchConfig, runs: list[ConfiguredRun]
) -> None:
    assert len(runs) == 12
    last = runs[-1]
    assert last.name == "learning_rate=0.003,head_dropout=0.1 seed 3"
    assert last.config.optimizer.learning_rate == 3e-3
    assert last.config.model.head_dropout == 0.1
    assert (last.config.train.seed, last.config.train.steps) == (3, 2)
    assert last.folder == Path(search.output, "cells", last.cell.name, "seed_3")
    assert {run.config.finetune.cache for run in runs} == {f"{search.output}/encoded"}
    # The folder depends on the values only, so a longer list finds finished runs again.
    longer = replace(search, grid={**search.grid, "optimizer.learning_rate": [2e-3, 1e-3, 3e-3]})
    names = {cell.name for cell in list_cells(longer, load_task(search.task))}
    assert {run.cell.name for run in runs} < names
    assert Cell({"tokenizer.kind": "a/b"}).name != Cell({"tokenizer.kind": "a_b"}).name


def test_a_sample_is_that_of_the_whole_grid(search: SearchConfig) -> None:
    """Also where the grid is too large to be built."""
    task = load_task(search.task)
    cells = list_cells(search, task)
    chosen = np.random.default_rng(0).choice(4, 3, replace=False)
    assert list_cells(replace(search, sample=3), task) == [cells[i] for i in sorted(chosen)]
    assert list_cells(replace(search, sample=9), task) == cells
    large = {f"train.key{number}": list(range(1, 101)) for number in range(4)}
    tracemalloc.start()
    sampled = list_cells(replace(search, grid={**GRID, **large}, sample=4), task)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len({cell.name for cell in sampled}) == 4
    assert all(list(cell.values) == [*GRID, *large] for cell in sampled)
    assert peak < 1 << 22


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seeds=1000000000"], "seeds=1000000000: give at most 10,000"),
        (["seeds=9999", "LARGE"], "seeds each; a search has at most 100,000 runs"),
        (["LARGE", "LARGER"], "40,000,000 of the grid's 40,000,000 cells with 3 seeds each"),
        (["LARGE", "LARGER", "sample=40000"], "40,000 of the grid's 40,000,000 cells"),
    ],
)
def test_searches_without_bounds_are_refused_at_once(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    lists = {
        "LARGE": f"train.global_batch_size={list(range(1, 1001))}",
        "LARGER": f"train.eval_every={list(range(1, 10001))}",
    }
    given = [lists.get(argument, argument) for argument in arguments]
    for option in ("--dry-run", "--table"):
        error = refused(option, *given)
        assert message in error
        assert error.count("\n") == 1


def test_finished_means_the_last_step_and_its_validation(
    search: SearchConfig, runs: list[ConfiguredRun]
) -> None:
    """Scores of a first cell whose best validation would be the interrupted one."""
    for number, run in enumerate(runs[:3]):
        shutil.rmtree(run.folder, ignore_errors=True)
        write_finished_run(run.folder, 0.5, 0.6, 0.9)
        if number < 2:
            metrics = run.folder / "metrics.jsonl"
            metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    found = [read_result(run.folder, "accuracy") for run in runs[:4]]
    assert [result and (result.score, result.step) for result in found] == [
        None, None, (0.9, 3), None,
    ]  # fmt: skip
    assert not (runs[0].folder / RESULT_FILE).exists()
    # Resumed: the validation is recorded now.
    shutil.copy(runs[2].folder / "metrics.jsonl", runs[0].folder)
    result = read_result(runs[0].folder, "accuracy")
    assert result is not None
    assert result.score == 0.9


def test_results_of_another_metric_are_not_shown(
    search_file: Path, runs: list[ConfiguredRun], refused: Callable[..., str]
) -> None:
    """The order of the task's metrics was changed; the old one has selected the checkpoints."""
    finish(runs[0], 0.5)
    task = search_file.parent / "data" / "task.yaml"
    task.write_text(task.read_text().replace("[accuracy]", "[f1, accuracy]"))
    for option in ("--table", "--no-check"):
        error = refused(option)
        assert "accuracy has selected this checkpoint, but the task's first metric is f1" in error


def test_a_run_without_a_score_does_not_end_the_search(
    search: SearchConfig, runs: list[ConfiguredRun]
) -> None:
    """A diverged run: its cell stays incomplete, and the others are compared."""
    for run in runs[:6]:
        finish(run, 0.5)
    (runs[0].folder / RESULT_FILE).unlink()
    shutil.rmtree(runs[0].folder)
    write_finished_run(runs[0].folder, 0.5)
    record = {"kind": "validation", "step": 1, "loss": None, "accuracy": None, "score": None}
    (runs[0].folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    for _ in range(2):
        found = collect(runs, "accuracy")
        assert [(result.is_complete, len(result.scores)) for result in found[:2]] == [
            (False, 2), (True, 3),
        ]  # fmt: skip
    assert best_cell(found, "median") is found[1]
    assert "2/3" in format_table(search, "accuracy", found)


def test_a_search_is_not_continued_with_other_inputs(
    search_file: Path, runs: list[ConfiguredRun], refused: Callable[..., str]
) -> None:
    for run in runs:
        finish(run, 0.5)
    assert main(["search", str(search_file)]) == EXIT_DONE
    assert main(["search", str(search_file)]) == EXIT_DONE
    dev = Path(json.loads(search_file.read_text())["data"]) / "dev.tsv"
    dev.write_text(dev.read_text().replace("good", "bad", 1))
    error = refused()
    assert "has runs with data_fingerprint=" in error
    assert "give the search another output" in error


def test_a_run_is_not_continued_with_other_values(
    runs: list[ConfiguredRun], refused: Callable[..., str]
) -> None:
    run = runs[0]
    run.write_config()
    run.check_config()
    changed = replace(run.config, optimizer=replace(run.config.optimizer, weight_decay=0.5))
    with pytest.raises(ConfigError, match=r"optimizer.weight_decay was 0.01 and is now 0.5"):
        replace(run, config=changed).write_config()
    # Nor is the result of a finished one shown beside others.
    finish(run, 0.5)
    shown = refused("optimizer.weight_decay=0.5")
    assert "optimizer.weight_decay was 0.01 and is now 0.5" in shown


def test_table_and_files_have_the_statistics_of_each_cell(
    search: SearchConfig, runs: list[ConfiguredRun]
) -> None:
    scores = ([0.5, 0.7, 0.9], [0.8, 0.8, 0.2], [0.9, 0.9], [])
    for number, cell_scores in enumerate(scores):
        for run, score in zip(runs[3 * number :], cell_scores, strict=False):
            finish(run, score)
    found = collect(runs, "accuracy")
    best = best_cell(found, "median")
    assert best is found[1]
    assert best_cell(found, "mean") is found[0]
    text = format_table(search, "accuracy", found)
    assert "8 of 12 runs finished" in text
    assert "accuracy on the split dev" in text
    assert "no test result" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0.001", "0.1", "3/3", "0.8000", "0.6000", "0.2000", "0.8000"] in rows
    assert ["0.001", "0", "3/3", "0.7000", "0.7000", "0.5000", "0.9000"] in rows
    assert ["0.003", "0", "2/3", "0.9000", "0.9000", "0.9000", "0.9000"] in rows
    assert ["0.003", "0.1", "0/3", "-", "-", "-", "-"] in rows
    assert f"best cell by median: {best.cell.name}" in text

    as_json, as_csv = write_results(search, "accuracy", found)
    content = json.loads(as_json.read_text())
    assert (content["split"], content["metric"]) == ("dev", "accuracy")
    assert content["best"] == f"cells/{best.cell.name}"
    assert content["cells"][1]["scores"] == {"1": 0.8, "2": 0.8, "3": 0.2}
    lines = list(csv.DictReader(as_csv.open()))
    assert [line["finished"] for line in lines] == ["3", "3", "2", "0"]
    assert lines[0]["max"] == "0.9"
    assert lines[2]["seed_3"] == lines[3]["median"] == ""


def test_prune_keeps_the_best_cell_and_unfinished_ones(
    search: SearchConfig, runs: list[ConfiguredRun]
) -> None:
    for run, score in zip(runs, [0.5] * 3 + [0.7] * 3 + [0.9] * 2, strict=False):
        finish(run, score)
    for run in runs:
        checkpoints_dir(run.folder).mkdir(parents=True)
        (run.folder / "outputs").mkdir()
    found = collect(runs, "accuracy")
    assert prune(found, search.select) == 3
    left = [run for run in runs if checkpoints_dir(run.folder).exists()]
    assert left == runs[3:]
    assert left == [run for run in runs if (run.folder / "outputs").exists()]
    assert collect(runs, "accuracy") == found


def test_a_search_is_submitted_by_one_command_at_a_time(
    search: SearchConfig, refused: Callable[..., str]
) -> None:
    Path(search.output).mkdir()
    lock = FileLock(Path(search.output) / ".lock")
    assert lock.acquire()
    error = refused("--cluster", "local", "--no-check")
    assert "another search runs in this folder" in error
    assert not (Path(search.output) / "submissions").exists()
    lock.release()


def test_the_data_of_a_search_are_checked_before_it_is_submitted(
    search_file: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    empty = tmp_path / "data" / "train.tsv"
    empty.write_text("text\tlabel\n")
    options = ["--cluster", "local", "--dry-run"]
    assert "train.tsv: no examples" in refused(*options)
    assert main(["search", str(search_file), *options, "--no-check"]) == EXIT_DONE


def test_dry_run_and_table_of_a_search(
    search_file: Path,
    runs: list[ConfiguredRun],
    refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "no run has begun" in refused("--table")
    assert main(["search", str(search_file), "--dry-run"]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert "4 cells x 3 seeds = 12 runs, 0 finished" in shown
    assert "learning_rate=0.003,head_dropout=0.1  (3 to run)" in shown
    assert not runs[0].folder.exists()
    for run in runs:
        finish(run, 0.5)
    # Everything is finished: nothing is started.
    assert main(["search", str(search_file)]) == EXIT_DONE
    assert "12 of 12 runs finished" in capsys.readouterr().out


def test_submission_as_job_array(search_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cluster", "dgx2", "--jobs", "5", "--dry-run", "--no-check", "ranks=2"]
    assert main(["search", str(search_file), *arguments]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert "--array=0-11%5" in shown
    # Two of a node's 16 GPUs per run.
    assert "--gres=gpu:2" in shown
    assert "--nodes=1" in shown
    assert "--exclusive" not in shown


Command = Callable[[ConfiguredRun], Sequence[str]]


def script(text: str) -> Command:
    """Return the command of runs that execute Python code in their folder."""

    def command(run: ConfiguredRun) -> Sequence[str]:
        run.folder.mkdir(parents=True, exist_ok=True)
        code = f"import os, pathlib, signal, sys, time; os.chdir({str(run.folder)!r})\n{text}"
        return [sys.executable, "-S", "-c", code]

    return command


@pytest.mark.slow
def test_as_many_runs_at_a_time_as_slots(runs: list[ConfiguredRun]) -> None:
    # The first two runs wait for each other's start, so both must be active at once.
    code = """
started = time.monotonic()
pathlib.Path("started").touch()
others = [pathlib.Path(folder) / "started" for folder in FOLDERS]
while not all(map(pathlib.Path.exists, others)) and time.monotonic() < started + 60:
    time.sleep(0.01)
print("device", os.environ["CUDA_VISIBLE_DEVICES"], started)
print("end", time.monotonic())
"""
    code = code.replace("FOLDERS", repr([str(run.folder) for run in runs[:2]]))
    ended: list[Outcome] = []
    slots = slot_environments(2, 2, ["4", "5", "6", "7"])
    assert slots == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    assert run_all(runs[:5], slots, ended.append, StopRequest(), script(code))
    assert [outcome.code for outcome in ended] == [0] * 5
    events = []
    for run in runs[:5]:
        first, last = (run.folder / LOG_FILE).read_text().splitlines()
        assert first.split()[1] in ("4,5", "6,7")
        events += [(float(first.split()[2]), 1), (float(last.split()[1]), -1)]
    active = itertools.accumulate(change for _, change in sorted(events))
    assert max(active) == 2


@pytest.mark.slow
def test_failures_end_a_search_only_before_the_first_success(runs: list[ConfiguredRun]) -> None:
    ended: list[Outcome] = []
    failing = script("print('no memory'); sys.exit(1)")
    assert not run_all(runs, [{}], ended.append, StopRequest(), failing)
    assert [(outcome.code, outcome.reason) for outcome in ended] == [(1, "no memory")] * 3
    ended.clear()
    fails = {run.folder for run in runs[1:6]}

    def mixed(run: ConfiguredRun) -> Sequence[str]:
        return failing(run) if run.folder in fails else script("pass")(run)

    assert run_all(runs[:8], [{}], ended.append, StopRequest(), mixed)
    assert [outcome.code for outcome in ended] == [0, 1, 1, 1, 1, 1, 0, 0]


def test_a_signal_lets_runs_save_and_a_second_kills_them(runs: list[ConfiguredRun]) -> None:
    stop = StopRequest()
    saves = """
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(75) if not pathlib.Path("stubborn").exists() else None
signal.signal(signal.SIGTERM, save)
pathlib.Path("started").touch()
while True: time.sleep(0.05)
"""

    ended: list[Outcome] = []
    folder = runs[0].folder
    previous = signal.signal(signal.SIGALRM, lambda *_: poke())

    def poke() -> None:
        if (folder / "started").exists() and not stop.numbers:
            stop.numbers.append(signal.SIGINT)
        elif (folder / "saved").exists():
            stop.numbers.append(signal.SIGINT)

    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        assert not run_all(runs, [{}], ended.append, stop, script(saves))
        assert [outcome.code for outcome in ended] == [75]
        assert (folder / "saved").exists()
        for name in ("saved", "started"):
            (folder / name).unlink()
        (folder / "stubborn").touch()
        stop.numbers.clear()
        ended.clear()
        assert not run_all(runs, [{}], ended.append, stop, script(saves))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert [outcome.code for outcome in ended] == [-signal.SIGKILL]
    assert (stop.exit_code, len(stop.numbers) >= 2) == (130, True)
