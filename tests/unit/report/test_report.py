"""``megatron-deberta report``: contents, damaged records, and one file without references."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE
from megatron_deberta.report.charts import Chart, Series, draw, thin
from megatron_deberta.report.tables import MAX_EVENTS
from tests.support.report_runs import write_run
from tests.support.selection import every


def report(output: Path, *runs: Path) -> str:
    assert main(["report", *map(str, runs), "--output", str(output)]) == EXIT_DONE
    return output.read_text()


def plain(page: str) -> str:
    """Return the page's text without tags, scripts and pictures."""
    page = re.sub(r"<(script|style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the report of one run."""
    folder = tmp_path_factory.mktemp("one")
    return report(folder / "out" / "report.html", write_run(folder / "base"))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the report of two runs."""
    folder = tmp_path_factory.mktemp("two")
    runs = [write_run(folder / "runs" / "base"), write_run(folder / "other" / "base", 2e-3)]
    return report(folder / "report.html", *runs)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "base")


def test_everything_that_a_run_records_is_shown(page: str) -> None:
    titles = re.findall(r'<h3 id="chart-\d+">(.*?)</h3>', page)
    assert titles == [
        "Loss", "Validation: masked accuracy", "Learning rate", "Gradient norm", "Throughput",
        "MFU", "Time by part", "Peak memory of rank 0", "Checkpoints",
        "Progress, restarts and faults", "BLiMP, all pairs", "BLiMP by field", "Fine-tuned: sst2",
    ]  # fmt: skip
    assert page.count("<svg") == len(titles)
    text = plain(page)
    assert "step 40 of 40" in text
    assert "best validation loss 4.5000 at step 40" in text
    assert "unigram baseline 6.5000" in text
    assert "starts 2" in text
    assert "1 skipped update" in text
    assert "backward pass and update 50%, forward pass 25%, waiting for data 12%" in text
    assert "job attempt 7.0 ended: rank 1 on n2: &lt;b&gt;killed&lt;/b&gt; by SIGKILL" in text
    assert "update skipped: gradient spike" in text
    assert "optimizer.learning_rate 0.001" in text
    assert "Damaged" not in text


def test_data_of_the_run(page: str, run: Path, tmp_path: Path) -> None:
    text = plain(page)
    assert "train books_text_document 1,200 30,000 25.0 5" in text
    assert "validation absent no manifest" in text
    (run / "books_text_document.manifest.json").write_text("{")
    text = plain(report(tmp_path / "report.html", run))
    assert "data of train" in text
    assert "books_text_document.manifest.json" in text


def test_samples_show_what_fills_a_mask_at_each_validation(page: str) -> None:
    assert "sample 4" in page
    assert '<mark title="input: [MASK]">mat<sub>1</sub></mark>' in page
    cells = re.findall(r"<td( class=\"right\")? title=\"(.*?)\">(\w+) <small>(\d+%)", page)
    other = "&lt;i&gt;dog&lt;/i&gt; 25.0%"
    assert cells == [("", other, "the", "50%"), (' class="right"', other, "mat", "50%")]


def test_classes_of_the_best_validation(run: Path, tmp_path: Path) -> None:
    """Of two runs, each with the name of its own; damaged records are left out."""
    keys = ("name", "labelled", "predicted", "right", "precision", "recall", "f1")
    rows = [("bad", 3, 2, 2, 1.0, 2 / 3, 0.8), ("<b>good</b>", 2, 3, 2, 2 / 3, 1.0, 0.8)]
    scores = {
        "unit": "examples",
        "classes": [dict(zip(keys, row, strict=True)) for row in rows],
        "confusion": [[2, 1], [0, 2]],
    }
    odd = [
        {"step": 50, **scores, "classes": [{"name": 3}]},
        {"step": 60, **scores, "classes": []},
        {"step": 61, **scores, "classes": [{**scores["classes"][0], "f1": "x"}]},
    ]
    other = write_run(tmp_path / "other" / "base")
    with (other / "metrics.jsonl").open("a") as metrics:
        for step, score in ((20, 0.9), (40, 0.5)):
            record = {"step": step, "kind": "validation", "loss": 1.0, "score": score}
            metrics.write(json.dumps(record) + "\n")
    lines = [{"step": 20, **scores}, {"step": 40, **scores, "confusion": [[1]]}, *odd]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (other / "class_scores.jsonl").write_text(text)
    shown = plain(report(tmp_path / "report.html", run, other))
    assert "Classes other/base, dev split, step 20 class examples predicted" in shown
    assert "bad 3 2 2 1.0000 0.6667 0.8000 &lt;b&gt;good&lt;/b&gt; 2 3 2 0.6667" in shown
    assert (
        "label / prediction bad &lt;b&gt;good&lt;/b&gt; bad 2 1 &lt;b&gt;good&lt;/b&gt; 0 2"
        in shown
    )
    # Without scores the last one counts; a matrix of another size is left out.
    (run / "class_scores.jsonl").write_text(text)
    shown = plain(report(tmp_path / "one.html", run))
    assert "Classes dev split, step 40 class" in shown
    assert "label / prediction" not in shown


def test_several_runs_are_compared(comparison: str) -> None:
    text = plain(comparison)
    # Names are the shortest ends of the paths that differ.
    assert "runs/base and other/base" in text
    differences = text[text.index("Configuration differences") :]
    assert "optimizer.learning_rate 0.001 0.002" in differences
    assert "train.steps" not in differences
    assert "Time by part: other/base" in text


def test_damaged_records_are_named_and_left_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("metrics", "timeline", "chain", "samples"):
        path = run / f"{name}.jsonl"
        lines = path.read_bytes().splitlines()
        damaged = [lines[0], b'{"step": 1, "ki', b"\xff\x00", b"[3]", *lines[1:], b'{"step": 2']
        path.write_bytes(b"\n".join(damaged))
    bad = {"step": 60, "samples": [7, {"sample": 1, "pieces": ["a"], "masks": [{"position": 9}]}]}
    path = run / "samples.jsonl"
    path.write_text(json.dumps(bad) + "\n" + path.read_text(errors="replace"))
    (run / "config.yaml").write_text("model: [")
    (run / "finetuned" / "sst2" / "curve.json").write_text("{")
    (run / "timeline.jsonl").open("ab").write(
        b'\n{"event": "steps", "time": 1e300, "step": 3, "seconds": 5, "memory_bytes": "x"}\n'
    )
    text = plain(report(tmp_path / "report.html", run))
    warnings = capsys.readouterr().err
    for problem in (
        "metrics.jsonl: 3 damaged lines are left out (line 2, 3, 4)",
        "metrics.jsonl: the last line is incomplete and left out",
        "config.yaml: damaged and left out",
        "samples.jsonl: 2 damaged samples are left out",
        "finetuned/sst2/curve.json: damaged and left out",
    ):
        assert problem in text
        assert f"base: {problem}" in warnings
    assert "step 40" in text
    assert "Traceback" not in warnings


def test_numbers_beyond_all_limits_are_damage(
    run: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    damaged: dict[str, list[dict[str, Any]]] = {
        "metrics": [
            {"step": 2**64 - 1, "kind": "train", "loss": 1.0},
            {"step": -1, "kind": "train", "loss": 1.0},
            {"step": True, "kind": "train", "loss": 1.0},
            {"step": 40, "kind": "train", "loss": 1e308},
            {"step": 40, "kind": "validation", "loss": -1e308},
        ],
        "timeline": [
            {"event": "steps", "time": 1e308, "step": 3},
            {"event": "steps", "time": 1.0, "step": 3, "seconds": {"step": 1e308}},
        ],
        "chain": [{"event": "start", "time": -1.0}],
        "samples": [{"step": 2**64 - 1, "samples": []}],
    }
    for name, records in damaged.items():
        with (run / f"{name}.jsonl").open("a") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in records)
    text = plain(report(tmp_path / "report.html", run))
    for name, records in damaged.items():
        lines = "line is" if len(records) == 1 else "lines are"
        assert f"{name}.jsonl: {len(records)} damaged {lines} left out" in text
    assert "step 40 of 40" in text
    assert "best validation loss 4.5000 at step 40" in text
    assert not [warning for warning in recwarn if "overflow" in str(warning.message)]


def test_the_loss_of_two_models_names_the_one_that_has_it(run: Path, tmp_path: Path) -> None:
    config = (run / "config.yaml").read_text()
    assert "name: mlm\n" in config
    (run / "config.yaml").write_text(config.replace("name: mlm\n", "name: rtd\n"))
    text = plain(report(tmp_path / "report.html", run))
    assert "best validation loss (generator) 4.5000 at step 40" in text
    assert "training loss (generator) 5.0000" in text
    assert "Of replaced-token detection: the generator&#39;s loss." in text


def test_a_run_with_metrics_only(run: Path, tmp_path: Path) -> None:
    for path in run.iterdir():
        if path.name.endswith("l") and path.name not in ("metrics.jsonl", "config.yaml"):
            path.unlink()
    (run / "metrics.jsonl").write_text('{"step":1,"kind":"train","loss":null}\n')
    text = plain(report(tmp_path / "report.html", run))
    assert "Overview" in text
    assert "Restarts" not in text


def test_overflows_are_no_faults_and_long_lists_are_cut(run: Path, tmp_path: Path) -> None:
    lines = [{"step": step, "kind": "guard", "skip": "overflow"} for step in range(9)]
    lines += [{"step": step, "kind": "guard", "skip": "gradient spike"} for step in range(300)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = plain(report(tmp_path / "report.html", run))
    assert "update skipped: overflow" not in text
    assert "300 skipped updates, 0 rollbacks" in text
    assert text.count("update skipped: gradient spike") == MAX_EVENTS == 200
    assert "100 earlier ones are not listed" in text
    assert "job attempt 7.0 ended" in text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["absent"], "absent: no such folder; give run folders (train.run_dir)"),
        (["."], "no metrics.jsonl here; give a run that has trained"),
        (["runs/base", "runs/../runs/base"], "is given twice"),
    ],
)
def test_wrong_runs_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], message: str
) -> None:
    output = tmp_path / "report.html"
    folders = [str(tmp_path / name) for name in names]
    assert main(["report", *folders, "--output", str(output)]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not output.exists()


def test_the_page_refers_to_nothing_else(comparison: str) -> None:
    class References(HTMLParser):
        found: list[str]
        ids: list[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [
                value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")
            ]
            self.ids += [value or "" for name, value in attrs if name == "id"]

    parser = References()
    parser.found, parser.ids = [], []
    parser.feed(comparison)
    assert [name for name in parser.found if not name.startswith("#")] == ["data:,"]
    assert set(re.findall(r"https?://[^\"' ]*", comparison)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\((.)", comparison)) == {"#"}
    assert "default-src 'none'" in comparison
    # Pictures share a document, so that equal identifiers would show the wrong parts.
    assert len(parser.ids) == len(set(parser.ids))
    assert len(comparison) < 1_000_000


def test_colours_of_charts_come_from_the_style_sheet() -> None:
    series = [Series("a", [(0, 1), (1, 2)], 0), Series("b", [(0, 2), (1, 1)], 9, "points")]
    svg = draw(Chart("$t_1", "$y$ <share>", series), 3).svg
    assert not re.findall(r"#[0-9a-fA-F]{6}", svg)
    assert "var(--c0)" in svg
    assert "var(--c1)" in svg
    assert "$y$ &lt;share&gt;" in svg


def test_thinned_lines_keep_their_spikes() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 50.0)
    points[7] = (7.0, -3.0)
    thinned = thin(points, 100)
    assert len(thinned) <= 100
    assert {points[0], points[7], points[54_321], points[-1]} <= set(thinned)
    assert thinned == sorted(thinned)


@pytest.mark.parametrize("name", ["timeline.jsonl", "samples.jsonl", "chain.jsonl", "config.yaml"])
@pytest.mark.parametrize("kind", every(2, ["pipe", "device"], ["slow"]))
def test_files_without_an_end_are_left_out(tmp_path: Path, name: str, kind: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name) if kind == "pipe" else (run / name).symlink_to("/dev/zero")
    page = tmp_path / "report.html"
    assert main(["report", str(run), "--output", str(page)]) == EXIT_DONE
    assert "regular file" in page.read_text()
