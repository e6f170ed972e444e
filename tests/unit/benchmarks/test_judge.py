"""Tests of ``benchmarks.learn.judge`` and of its Muon optimizer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learn import judge as judges
from benchmarks.learn import judge_train
from benchmarks.learn.finetune_study import Cell
from benchmarks.tables.figures import draw_recipes, shown_numbers
from benchmarks.tables.learn import which_recipe
from megatron_deberta.config import load_config
from megatron_deberta.config.phases import segments
from megatron_deberta.config.schema import OptimizerConfig
from megatron_deberta.engine import reference_engine
from megatron_deberta.engine.optimizer import parameter_groups
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE

NAMES = sorted(path.stem for path in judges.RECIPES.glob("*.yaml"))


def of(folder: Path, *recipes: str, seeds: int = 2) -> judges.Judge:
    return judges.Judge(
        recipes, 100.0, seeds, folder / "corpus", folder / "work", folder / "out.json"
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_is_a_run_that_differs_from_the_baseline(tmp_path: Path, name: str) -> None:
    recipe, baseline = (
        load_config(judges.RECIPES / f"{n}.yaml", ["train.steps=200"])
        for n in (name, judges.BASELINE)
    )
    assert sum(part.steps for part in segments(recipe)) == 200
    assert recipe.train.seed == baseline.train.seed
    assert (recipe.parallel, recipe.precision) == (baseline.parallel, baseline.precision)
    # Only in its optimizer's code does Muon differ.
    assert (recipe == baseline) == (name in (judges.BASELINE, "muon"))
    assert of(tmp_path, name).data(name).name == {
        "vocab_16k": "16384", "vocab_32k": "32768",
    }.get(name, "8192")  # fmt: skip


def test_phases_are_weighted_by_their_steps() -> None:
    marks = [(step, 2.0 * step) for step in range(1, 11)]
    marks += [(step, 20.0 + 5.0 * (step - 10)) for step in range(11, 41)]
    assert judge_train.seconds_per_step(marks, [40]) == 5.0
    assert judge_train.seconds_per_step(marks, [10, 40]) == (10 * 2.0 + 30 * 5.0) / 40


def test_tokens_of_phases_add_up() -> None:
    recipe = load_config(judges.RECIPES / "batch_ramp.yaml", ["train.steps=100"])
    assert judges.tokens_until(recipe, 15) == 64 * (8 * 10 + 16 * 5)
    assert judges.tokens_until(recipe, 100) == 64 * (8 * 10 + 16 * 10 + 24 * 10 + 32 * 70)


def test_times_of_another_day_are_relative_to_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"baseline": 3.0, "mask_20": 6.0}
    measured: list[str] = []

    def run(self: Any, log: Path, *arguments: str, module: str = "") -> bool:
        assert module == "benchmarks.learn.judge_train"
        measured.append(log.parent.name)
        output = Path(arguments[arguments.index("--measure") + 1])
        output.write_text(json.dumps(seconds[log.parent.name]))
        return True

    monkeypatch.setattr(judges.Commands, "__call__", run)
    record: dict[str, Any] = {"seconds_per_step": {"baseline": 2.0}}
    judge = of(tmp_path, "baseline", "mask_20")
    judges.measure(judge, record)
    assert record["seconds_per_step"] == {"baseline": 2.0, "mask_20": 4.0}
    assert measured == ["baseline", "mask_20"] * judge.rounds
    judges.measure(judge, record)
    assert len(measured) == 2 * judge.rounds


def test_finished_runs_are_kept_and_stopped_ones_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    stopped = {"averaging"}

    def train(judge: Any, command: Any, recipe: str, seed: int, steps: int) -> Path | None:
        trained.append(f"{recipe} {seed} {steps}")
        return None if recipe in stopped else tmp_path

    def evaluate(judge: Any, command: Any, recipe: str, seed: int, *_: object) -> Any:
        scores = {name: 0.5 + (recipe == "averaging") * seed / 10 for name in judges.SCORES}
        curve = [{"step": 5, "tokens": 10, "bits_per_byte": 2.0}]
        return {"recipe": recipe, "seed": seed, "scores": scores, "curve": curve}

    monkeypatch.setattr(judges, "prepare", lambda judge: None)
    monkeypatch.setattr(judges, "train", train)
    monkeypatch.setattr(judges, "evaluate", evaluate)
    judge = of(tmp_path, "baseline", "averaging")
    before = {"seconds_per_step": {"baseline": 2.0, "averaging": 2.5}, "rows": {}}
    judge.output.write_text(json.dumps(before))
    judges.judge_recipes(judge, judges.Commands())
    assert trained == ["baseline 1 50", "averaging 1 40"]
    stopped.clear()
    found = judges.judge_recipes(judge, judges.Commands())
    assert trained[2:] == ["averaging 1 40", "baseline 2 50", "averaging 2 40"]
    assert list(json.loads(judge.output.read_text())["rows"]) == list(found["rows"])
    first, second = found["comparison"]
    assert (first["recipe"], first["scores"]["blimp"]) == ("baseline", {"mean": 0.5})
    changed = second["scores"]["blimp"]
    assert changed["difference"] == pytest.approx(0.15)
    # t(0.975) of one degree of freedom, times the standard error of 0.1 and 0.2
    assert changed["half"] == pytest.approx(12.706 * 0.05, rel=1e-3)
    # Another program has written meanwhile.
    lost = json.loads(judge.output.read_text())
    del lost["rows"]["averaging/2"]
    judge.output.write_text(json.dumps(lost))

    def train_beside(*arguments: Any) -> Path | None:
        record = json.loads(judge.output.read_text())
        record["rows"]["mask_20/1"] = evaluate(None, None, "mask_20", 1)
        judge.output.write_text(json.dumps(record))
        return train(*arguments)

    monkeypatch.setattr(judges, "train", train_beside)
    assert list(judges.judge_recipes(judge, judges.Commands())["rows"]) == [
        "baseline/1", "averaging/1", "baseline/2", "mask_20/1", "averaging/2",
    ]  # fmt: skip
    curves = judges.curves(found)
    assert curves == {"baseline": [[0.17, 0.0, 2.0]], "averaging": [[0.21, 0.0, 2.0]]}
    picture = tmp_path / "which-recipe.png"
    picture.write_bytes(draw_recipes(curves))
    assert shown_numbers(picture) == curves
    assert "| `averaging` |" in which_recipe(found)
    assert "| +0.150 ± 0.635 |" in which_recipe(found)
    assert "| no difference seen |" in which_recipe(found)
    other = judges.Judge(("baseline",), 50.0, 1, tmp_path, tmp_path, judge.output)
    with pytest.raises(SystemExit, match=r"budget of 100\.0 s"):
        judges.judge_recipes(other, judges.Commands())


def test_a_failed_run_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(judge: Any, command: Any, recipe: str, *_: object) -> Path:
        if recipe == "rate_3e-3":
            raise SystemExit("judge.txt: ended with exit code 1")
        return tmp_path

    def evaluate(judge: Any, command: Any, recipe: str, seed: int, *_: object) -> Any:
        return {"recipe": recipe, "seed": seed, "scores": dict.fromkeys(judges.SCORES, 0.5),
                "curve": []}  # fmt: skip

    monkeypatch.setattr(judges, "prepare", lambda judge: None)
    monkeypatch.setattr(judges, "train", train)
    monkeypatch.setattr(judges, "evaluate", evaluate)
    recipes = ("baseline", "rate_3e-3", "mask_20")
    judge = of(tmp_path, *recipes, seeds=1)
    before = {"seconds_per_step": dict.fromkeys(recipes, 2.0), "rows": {}}
    judge.output.write_text(json.dumps(before))
    with pytest.raises(SystemExit, match="rate_3e-3/1: judge.txt: ended with exit code 1"):
        judges.judge_recipes(judge, judges.Commands())
    assert list(json.loads(judge.output.read_text())["rows"]) == ["baseline/1", "mask_20/1"]


def test_one_seed_of_a_recipe_has_the_noise_of_the_others() -> None:
    rows = [
        {"recipe": recipe, "seed": seed, "scores": dict.fromkeys(judges.SCORES, score)}
        for recipe, seed, score in (
            ("baseline", 1, 1.0), ("baseline", 2, 2.0), ("a", 1, 3.0), ("a", 2, 4.2), ("b", 2, 7.0),
        )
    ]  # fmt: skip
    found = {each["recipe"]: each["scores"]["blimp"] for each in judges.compare(rows)}
    # Seed 2 adds 1.1; residuals of the four complete runs are 0.05.
    spread = math.sqrt(4 * 0.05**2)
    assert found["a"]["difference"] == pytest.approx(2.1)
    assert found["a"]["half"] == pytest.approx(12.706 * spread, rel=1e-3)
    # 7.0 - (1.5 + 0.55): variance 1 of b's run, 3 / 4 of the baseline with seed 2
    assert found["b"]["difference"] == pytest.approx(4.95)
    assert found["b"]["half"] == pytest.approx(12.706 * spread * math.sqrt(1.75), rel=1e-3)
    assert "half" not in found["baseline"]
    only_first = list(judges.compare([row for row in rows if row["seed"] == 1]))
    assert [each["scores"]["blimp"].get("half") for each in only_first] == [None, None]


def test_a_run_is_judged_by_its_average_and_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = of(tmp_path, "averaging")
    run = judge.run("averaging", 1)
    commands: list[tuple[str, ...]] = []

    def call(self: Any, log: Path, *arguments: str, module: str = "") -> bool:
        commands.append(arguments)
        if "--output" in arguments:
            output = Path(arguments[arguments.index("--output") + 1])
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps({"bits_per_byte": len(commands), "accuracy": 0.75}))
        else:
            for step in (20, 33, 40):
                folder = run / "checkpoints" / f"step_{step:08d}"
                folder.mkdir(parents=True)
                (folder / "COMMITTED").touch()
            text = judge.file("averaging").read_text()
            text = text.replace("baseline.yaml", str(judges.RECIPES / "baseline.yaml"))
            # Step 33 is that of a run that was stopped.
            text += "checkpoint:\n  save_every: 20\n"
            (run / "config.yaml").write_text(text)
        return True

    def run_cell(study: Any, processes: Any, cell: Cell) -> dict[str, Any]:
        study.work.mkdir(parents=True, exist_ok=True)
        return {"score": 0.25, "model": str(study.run)}

    monkeypatch.setattr(judges.Commands, "__call__", call)
    monkeypatch.setattr(judges, "run_cell", run_cell)
    command = judges.Commands()
    model = judges.train(judge, command, "averaging", 1, 40)
    assert model == run / "average"
    row = judges.evaluate(judge, command, "averaging", 1, model)
    assert [point["step"] for point in row["curve"]] == [20, 40]
    models = [words[words.index("--model") + 1] for words in commands if "--model" in words]
    assert models == [str(run / "checkpoints" / "step_00000020"), str(model), str(model)]
    assert row["scores"] == {
        "bits_per_byte": row["curve"][-1]["bits_per_byte"], "blimp": 0.75, "sst2": 0.25,
        "chunking": 0.25,
    }  # fmt: skip
    assert json.loads((run / "tasks" / "sst2.json").read_text())["model"] == str(model)
    count = len(commands)
    assert judges.evaluate(judge, command, "averaging", 1, model) == row
    assert len(commands) == count


@pytest.mark.parametrize(("code", "finished"), [(EXIT_DONE, True), (EXIT_REQUEUE, False)])
def test_a_stopped_command_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, finished: bool
) -> None:
    monkeypatch.setattr(judges.Processes, "run", lambda *_: (code, 1.0))
    assert judges.Commands()(tmp_path / "log", "pretrain") == finished
    assert not judges.Commands(-math.inf)(tmp_path / "log", "pretrain")


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_orthogonalized_keeps_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = judge_train.orthogonalized(matrix)
    # Five steps bring singular values between 0.68 and 1.13, as Jordan et al. state.
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.2
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ found @ v.mT
    torch.testing.assert_close(inner, torch.diag(inner.diagonal()), atol=1e-4, rtol=0)


def test_muon_updates_matrices_of_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_engine, "build_optimizer", reference_engine.build_optimizer)
    monkeypatch.setattr(reference_engine, "parameter_groups", reference_engine.parameter_groups)
    judge_train.use_muon()
    generator = torch.Generator().manual_seed(0)
    names = ("encoder.layers.0.ffn.weight", "encoder.layers.0.ffn.bias", "embeddings.word.weight")
    shapes = ((4, 8), (4,), (16, 8))
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    before = [weight.detach().clone() for weight in weights]
    config = OptimizerConfig()
    groups = reference_engine.parameter_groups(zip(names, weights, strict=True), 0.1)
    optimizer = reference_engine.build_optimizer(groups, config, allow_apex=False)
    peers = [torch.nn.Parameter(weight.clone()) for weight in before]
    adam = torch.optim.AdamW(
        parameter_groups(zip(names, peers, strict=True), 0.1), fused=True, eps=config.eps,
        lr=config.learning_rate, betas=(config.beta1, config.beta2),
    )  # fmt: skip
    for weight, peer, gradient in zip(weights, peers, gradients, strict=True):
        weight.grad, peer.grad = gradient.clone(), gradient.clone()
    optimizer.step()
    adam.step()
    assert torch.equal(weights[1], peers[1])
    assert torch.equal(weights[2], peers[2])
    rate = config.learning_rate
    # After one step the momentum is the gradient times 0.05; its scale does not matter.
    step = judge_train.orthogonalized(gradients[0]) * 0.2 * math.sqrt(8)
    torch.testing.assert_close(
        weights[0].detach(), before[0] * (1 - rate * 0.1) - rate * step, atol=1e-6, rtol=1e-5
    )
