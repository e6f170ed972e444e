"""SQuAD 2.0: ``evaluate`` finds the threshold of no answer on dev, ``predict`` applies it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE
from tests.support.task_files import squad
from tests.support.tiny_task import MODEL

pytest.importorskip("sklearn")
QUESTIONS = [
    {"id": "0", "question": "Who ran?", "answers": [{"text": "fox", "answer_start": 10}]},
    {"id": "1", "question": "Who slept?", "answers": []},
    {"id": "2", "question": "What did it meet?", "answers": [{"text": "dog", "answer_start": 28}]},
    {"id": "3", "question": "Why did it meet?", "answers": []},
]


def test_the_threshold_of_dev_is_applied(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        questions = [{**q, "is_impossible": not q["answers"]} for q in QUESTIONS]
        (tmp_path / f"{split}-v2.0.json").write_text(squad("v2.0", questions))
    run_dir, report = tmp_path / "run", tmp_path / "dev.json"
    common = ["squad2", "--data", str(tmp_path)]
    settings = (
        "data.sequence_length=32", "train.steps=2", "train.global_batch_size=4",
        "optimizer.warmup_fraction=0.5", "parallel.engine=plain", "train.device=cpu",
        "log.tensorboard=false", f"train.run_dir={run_dir}",
    )  # fmt: skip
    assert main(["finetune", *common, "--model", str(MODEL), *settings]) == EXIT_DONE
    trained = [*common, "--model", str(run_dir)]
    assert main(["evaluate", "task", *trained, "--output", str(report)]) == EXIT_DONE
    scores = json.loads(report.read_text())

    def unanswered(name: str, *options: str) -> tuple[set[str], dict[str, float]]:
        """Return the questions without answer, and the scores of no answer."""
        board = tmp_path / name
        command = ["predict", *trained, "--split", "dev", "--leaderboard", str(board), *options]
        assert main([*command, "--output", str(tmp_path / f"{name}.jsonl")]) == EXIT_DONE
        answers = json.loads((board / "dev_predictions.json").read_text())
        odds = json.loads((board / "dev_null_odds.json").read_text())
        return {key for key, text in answers.items() if not text}, odds

    _, odds = unanswered("zero")
    threshold = scores["null_threshold"]
    for name, value in (("zero", 0.0), ("dev", threshold), ("all", min(odds.values()) - 1)):
        found, _ = unanswered(name, f"--null-threshold={value}")
        assert found == {key for key, odd in odds.items() if odd > value}
    assert len(unanswered("all", "--null-threshold=-1e9")[0]) == len(QUESTIONS)
    # No answer to two of four questions is right, so that dev's best is at least that.
    assert scores["best_exact"] >= 0.5
