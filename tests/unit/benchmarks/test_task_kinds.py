"""The study of fine-tuning options: its cells, their commands, resumption, and the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from benchmarks.learn import task_kinds as kinds
from benchmarks.learn.finetune_study import Processes
from benchmarks.lib.provenance import ROOT
from megatron_deberta.config import load_config
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.finetune.settings import finetune_config
from megatron_deberta.tasks.task import load_task

RUN = ROOT / "tests" / "golden" / "c6955b0" / "run"
TOKENIZER = RUN.parent / "tokenizer"


def of(folder: Path, **changes: Any) -> kinds.Study:
    return kinds.Study(RUN, folder / "corpus", folder / "work", folder / "out.json", **changes)


@pytest.mark.parametrize("question", kinds.QUESTIONS, ids=lambda question: question.name)
def test_variants_are_valid_configs_that_differ(tmp_path: Path, question: kinds.Question) -> None:
    model = open_source_model(RUN, str(TOKENIZER))
    task = load_task(question.task)
    assert question.split in task.splits
    assert set(question.metrics) <= set(task.metrics)
    found = []
    for variant in question.variants:
        *pretraining, finetuning, evaluation = of(tmp_path).commands(
            kinds.Cell(question, variant, 3)
        )
        assert len(pretraining) == (variant in question.pretraining)
        sections: list[Any] = []
        for words in pretraining:
            config = load_config(ROOT / words[1], words[2:])
            assert config.train.run_dir in finetuning
            assert config.data.train == load_config(RUN / "config.yaml").data.train
            sections += [config.objective, config.train.steps]
        overrides = [word for word in finetuning[1:] if "=" in word]
        data = finetuning[finetuning.index("--data") + 1]
        assert load_task(finetuning[1]).name == evaluation[2].rpartition("/")[2].partition(".")[0]
        config = finetune_config(finetuning[1], model, data, overrides, settings="none")
        assert config.train.seed == 3
        assert config.train.run_dir in evaluation
        assert evaluation[evaluation.index("--split") + 1] == question.split
        found.append([config.finetune, *sections])
    assert all(a != b for n, a in enumerate(found) for b in found[:n])


def test_finished_cells_are_skipped_and_stopped_ones_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    codes: dict[str, int] = {"RetroMAE": EXIT_REQUEUE}

    def run(self: Processes, arguments: list[str], log: Path) -> tuple[int, float]:
        variant = log.parent.parent.name
        started.append(f"{arguments[0]} {variant}")
        log.parent.mkdir(parents=True, exist_ok=True)
        (log.parent / "finetuning" / "checkpoints").mkdir(parents=True, exist_ok=True)
        (log.parent / "metrics.json").write_text(json.dumps({"spearman": 0.5, "pearson": 0.25}))
        return codes.get(variant, EXIT_DONE), 1.5

    monkeypatch.setattr(kinds.Processes, "run", run)
    monkeypatch.setattr(kinds, "SEEDS", 1)
    study = of(tmp_path, questions=kinds.QUESTIONS[-1:])
    cells = kinds.execute(study, 1, 100.0)["cells"]
    assert started == [
        "pretrain masked_training", "finetune masked_training", "evaluate masked_training",
        "pretrain RetroMAE", "finetune neither", "evaluate neither",
    ]  # fmt: skip
    assert list(cells) == ["embeddings/masked_training/1", "embeddings/neither/1"]
    first = cells["embeddings/masked_training/1"]
    assert first["metrics"] == {"spearman": 0.5, "pearson": 0.25}
    assert first["seconds"] == [1.5, 1.5, 1.5]
    assert not list((tmp_path / "work" / "embeddings" / "masked_training").rglob("checkpoints"))
    started.clear()
    codes.clear()
    assert kinds.execute(study, 1, -1.0)["cells"].keys() == cells.keys()
    assert started == []
    assert "embeddings/RetroMAE/1" in kinds.execute(study, 1, 100.0)["cells"]
    assert started == ["pretrain RetroMAE", "finetune RetroMAE", "evaluate RetroMAE"]


def test_variants_are_compared_with_the_first_over_seeds() -> None:
    scores = {"bce": (0.70, 0.75, 0.71), "ranknet": (0.80, 0.82, 0.84), "listnet": (0.9,)}
    cells = [
        {"question": "ranking", "variant": variant, "metrics": {"ndcg_at_10": x, "mrr_at_10": x}}
        for variant, values in scores.items()
        for x in values
    ]
    first, second, third, *_ = rows = list(kinds.compare(cells))
    assert len(rows) == 6
    assert "difference" not in first
    assert second["difference"] == pytest.approx(0.1)
    assert second["p"] == stats.ttest_ind(scores["ranknet"], scores["bce"], equal_var=False).pvalue
    # 3.72 degrees of freedom: t(0.975) = 2.860, times sqrt(0.0004 / 3 + 0.0007 / 3)
    assert second["high"] - second["low"] == pytest.approx(2 * 2.860 * 0.01915, rel=0.01)
    assert (third["stdev"], "low" in third) == (None, False)
    # Without the first variant there is nothing to compare with.
    others = [cell for cell in cells if cell["variant"] != "bce"]
    others += [cell for cell in others if cell["variant"] == "listnet"]
    assert not any("difference" in row for row in kinds.compare(others))
