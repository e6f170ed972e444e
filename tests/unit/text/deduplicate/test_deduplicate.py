"""The whole command: what goes, what stays, and that it all adds up."""

import csv
import gzip
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_deberta.cli.main import main
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.planning.text_jobs import Sample, describe_needs, needs, sample
from megatron_deberta.text.deduplicate import pairs, sign
from megatron_deberta.text.deduplicate.sign import Settings
from megatron_deberta.text.jobs import stages
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.jobs.units import UNIT_BYTES, plan_units
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import find_sources
from tests.support.duplicates import (
    contents,
    distinct_texts,
    edited,
    read_jsonl,
    run,
    write_jsonl,
)

CORPUS = Path(
    os.environ.get("MEGATRON_DEBERTA_CORPUS")
    or Path(__file__).parents[4].parent / "shared" / "corpus"
)


def unfinished_folder(output):
    return JobFolder(output).path


def records_of(inputs):
    return [record for path in inputs for record in read_jsonl(Path(path))]


def test_exactly_the_duplicates_go(corpus, tmp_path):
    records = records_of(corpus)
    summary = run(corpus, tmp_path / "out")
    removed = read_jsonl(tmp_path / "out" / "removed.jsonl")
    assert summary["removed"] == {"exact": 40, "near": 40}
    assert summary["kept"] == 160
    assert summary["documents"] == 240 == len(records)
    for line in removed:
        gone, kept = records[line["document"]], records[line["kept"]["document"]]
        # Of two copies the first stays.
        assert line["kept"]["document"] < line["document"]
        assert {gone["kind"], kept["kind"]} == {"", line["kind"]}
        assert line["jaccard"] == 1.0 if line["kind"] == "exact" else 0.7 <= line["jaccard"] < 1
    gone = {line["document"] for line in removed}
    assert len(gone) == 80
    kept = [r for path in sorted((tmp_path / "out").glob("part-*")) for r in read_jsonl(path)]
    assert kept == [record for number, record in enumerate(records) if number not in gone]


def test_places_in_the_report_are_those_in_the_files(corpus, tmp_path):
    run(corpus, tmp_path / "out", unit_bytes=20_000)
    assert len(list((tmp_path / "out").glob("part-*"))) > 6
    everything = records_of(corpus)
    for line in read_jsonl(tmp_path / "out" / "removed.jsonl"):
        content = Path(line["file"]).read_bytes()
        found = content.split(b"\n")[line["line"] - 1]
        assert json.loads(found) == everything[line["document"]]
        assert content[line["offset"] :].startswith(found)
        kept = line["kept"]
        found = Path(kept["file"]).read_bytes().split(b"\n")[kept["line"] - 1]
        assert json.loads(found) == everything[kept["document"]]


@pytest.mark.slow
def test_nothing_depends_on_workers_units_or_runs(corpus, tmp_path, monkeypatch):
    run(corpus, tmp_path / "one", unit_bytes=20_000)
    run(corpus, tmp_path / "two", workers=2, unit_bytes=20_000)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    monkeypatch.setattr(sign, "_RUN_DOCUMENTS", 7)
    monkeypatch.setattr(pairs, "_PAIRS_AT_ONCE", 5)
    monkeypatch.setattr(pairs, "_PAIRS_WAITING", 5)
    run(corpus, tmp_path / "runs", unit_bytes=20_000)
    assert contents(tmp_path / "one") == contents(tmp_path / "runs")
    monkeypatch.setattr("megatron_deberta.text.deduplicate.pairs.PART_DOCUMENTS", 130)
    run(corpus, tmp_path / "units", unit_bytes=40_000)
    for name in ("removed.jsonl", "clusters.npy"):
        assert contents(tmp_path / "one")[name] == contents(tmp_path / "units")[name]


def test_what_stays_holds_no_duplicates(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    kept = sorted(str(path) for path in (tmp_path / "out").glob("part-*"))
    assert run(kept, tmp_path / "again")["removed"] == {"exact": 0, "near": 0}


def test_a_chain_keeps_what_is_like_nothing_that_stays(tmp_path):
    """B goes for A; C is like B only, so it stays; all three are one cluster."""
    (text,) = distinct_texts(1)
    words = text.split()
    changed = [*words]
    changed[20] = changed[40] = "b"
    further = [*changed]
    further[60] = further[80] = "c"
    chain = [" ".join(each) for each in (words, changed, further)]
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": each} for each in chain])
    run([path], tmp_path / "out", settings=Settings(threshold=0.8))
    assert [line["document"] for line in read_jsonl(tmp_path / "out" / "removed.jsonl")] == [1]
    clusters = np.load(tmp_path / "out" / "clusters.npy", allow_pickle=False)
    assert len(clusters) == 2
    assert len({tuple(row[2:]) for row in clusters}) == 1


@pytest.mark.nightly
def test_of_many_revisions_none_that_stays_is_like_another(tmp_path):
    """Their buckets are crowded, and the eight before a revision may all go for a ninth."""
    draw = random.Random(5)
    words = [f"w{number}" for number in range(600)]
    texts = []
    for _ in range(250):
        texts.append(" ".join(words))
        words[draw.randrange(len(words))] = f"n{draw.randrange(10**6)}"
    runs = [{tuple(text.split()[i : i + 5]) for i in range(596)} for text in texts]
    staying: list[int] = []
    for number, mine in enumerate(runs):
        if all(len(mine & runs[n]) < 0.7 * len(mine | runs[n]) for n in staying):
            staying.append(number)
    assert len(staying) > 5
    source = write_jsonl(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    results = []
    for name, options in (("one", {}), ("two", {"workers": 2, "unit_bytes": 100_000})):
        run([source], tmp_path / name, **options)
        removed = read_jsonl(tmp_path / name / "removed.jsonl")
        results.append([(line["document"], line["kept"]["document"]) for line in removed])
        assert sorted({*range(250)} - {gone for gone, _ in results[-1]}) == staying
        for line in removed:
            mine, other = runs[line["document"]], runs[line["kept"]["document"]]
            assert line["jaccard"] == round(len(mine & other) / len(mine | other), 6)
    assert results[0] == results[1]
    # All are one page: its revisions must not be parted.
    clusters = np.load(tmp_path / "one" / "clusters.npy", allow_pickle=False)
    assert len(clusters) == 249
    assert len({tuple(row) for row in clusters[:, 2:].tolist()}) == 1


def test_copies_of_a_near_duplicate_name_what_stays(tmp_path):
    (text,) = distinct_texts(1)
    near = edited(text, 0.02)
    records = [{"text": each} for each in (text, near, near.upper())]
    path = write_jsonl(tmp_path / "c.jsonl", records)
    summary = run([path], tmp_path / "out")
    assert summary["removed"] == {"exact": 0, "near": 2}
    lines = read_jsonl(tmp_path / "out" / "removed.jsonl")
    assert [line["kept"]["document"] for line in lines] == [0, 0]
    assert lines[0]["jaccard"] == lines[1]["jaccard"] < 1


def test_short_documents(tmp_path):
    texts = ["one", "One ", "two", "one two", "one two three four", "one two three five"]
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": each} for each in texts])
    assert run([path], tmp_path / "out")["removed"] == {"exact": 1, "near": 0}


def test_exact_only(corpus, tmp_path):
    summary = run(corpus, tmp_path / "out", settings=Settings(exact_only=True))
    assert summary["removed"] == {"exact": 40, "near": 0}
    assert len(np.load(tmp_path / "out" / "clusters.npy", allow_pickle=False)) == 0


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_compression(corpus, tmp_path, compression):
    run(corpus, tmp_path / "plain")
    run(corpus, tmp_path / "out", compression=compression)
    for plain in (tmp_path / "plain").glob("part-*"):
        content = (tmp_path / "out" / f"{plain.name}.{compression}").read_bytes()
        if compression == "gz":
            assert gzip.decompress(content) == plain.read_bytes()
        else:
            decompressor = zstandard.ZstdDecompressor().decompressobj()
            assert decompressor.decompress(content) == plain.read_bytes()


def test_records_stay_as_they_were_and_every_format_is_read(tmp_path):
    texts = distinct_texts(6)
    odd = f'{{ "text" : {json.dumps(texts[0])} ,"n":1.50, "é":"\\u00e9"}}'
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + odd.encode() + b"\r\n")
    with gzip.open(corpus / "b.jsonl.gz", "wt") as stream:
        stream.write(json.dumps({"text": texts[1]}) + "\n" + json.dumps({"text": texts[0]}) + "\n")
    (corpus / "c.txt").write_text(f"{texts[2]}\n\n{texts[3]}\n{texts[4]}\n\n{texts[2]}\n")
    summary = run(sorted(str(path) for path in corpus.iterdir()), tmp_path / "out")
    assert summary["removed"] == {"exact": 2, "near": 0}
    (part,) = (tmp_path / "out").glob("part-*")
    lines = part.read_bytes().splitlines()
    assert lines[0] == odd.encode()
    assert [json.loads(line) for line in lines[1:]] == [
        {"text": texts[1]},
        {"text": texts[2]},
        {"text": f"{texts[3]}\n{texts[4]}"},
    ]


def test_tables(tmp_path):
    texts = distinct_texts(3)
    column = [texts[0], None, texts[1], texts[0].upper(), texts[2]]
    table = pyarrow.table({"body": column, "n": range(5)})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    arguments = ["deduplicate", "--input", str(tmp_path / "t.parquet"), "--keys", "body"]
    arguments += ["--output", str(tmp_path / "out"), "--workers", "0"]
    assert main([*arguments, "--max-bad-fraction", "1"]) == 0
    (part,) = (tmp_path / "out").glob("part-*")
    assert read_jsonl(part) == [{"body": text} for text in texts]
    (line,) = read_jsonl(tmp_path / "out" / "removed.jsonl")
    assert (line["line"], line["kept"]["line"]) == (4, 1)
    (line,) = read_jsonl(tmp_path / "out" / "quarantine.jsonl")
    assert line["line"] == 2


def test_bad_records_are_set_aside_and_counted(tmp_path, cli):
    good = [json.dumps({"text": text}).encode() for text in distinct_texts(20)]
    bad = [b'{"text": ', b'{"txt": "x"}', b'{"text": 7}', b'{"text": "\xff"}']
    bad += [b'{"text": "\\ud800"}', b'{"text": " \\n"}']
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n".join([*good[:10], *bad, *good[10:], good[0]]) + b"\n")
    arguments = ["deduplicate", "--input", str(path), "--output", str(tmp_path / "out")]
    assert "5 of 27 records are bad" in cli.errors(1, *arguments, "--workers", "0")
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--workers", "0", "--max-bad-fraction", "0.5"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["documents"] == 27 == summary["kept"] + 1 + sum(summary["quarantined"].values())
    assert summary["quarantined"]["empty"] == 1
    lines = read_jsonl(tmp_path / "out" / "quarantine.jsonl")
    assert sorted(line["line"] for line in lines) == [11, 12, 13, 14, 15, 16]
    assert all(line["file"] == str(path) and line["reason"] and line["detail"] for line in lines)


def test_a_second_call_finds_the_result_and_another_one_refuses(corpus, tmp_path):
    output = tmp_path / "out"
    run(corpus, output)
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    # Killed between publishing and cleaning up.
    unfinished_folder(output).mkdir()
    summary = run(corpus, output)
    assert summary["kept"] == 160
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before
    assert not unfinished_folder(output).exists()
    with pytest.raises(ConfigError, match="add --force"):
        run(corpus[:1], output)
    assert run(corpus[:1], output, force=True)["documents"] == 80
    assert not list(tmp_path.glob("out.*"))


def test_another_plan_does_not_take_over_unfinished_work(corpus, tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_deberta.text.deduplicate.pipeline._gather", stop)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path / "out")
    assert unfinished_folder(tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=r"threshold was 0\.7 when this run began and is 0\.8"):
        run(corpus, tmp_path / "out", settings=Settings(threshold=0.8))
    Path(corpus[0]).write_text("{}\n")
    with pytest.raises(ConfigError, match=f"{corpus[0]} has changed"):
        run(corpus, tmp_path / "out")


@pytest.mark.slow
def test_restart_forgets_unfinished_work(corpus, tmp_path, monkeypatch):
    folder = unfinished_folder(tmp_path / "out")
    folder.mkdir()
    (folder / "plan.json").write_text("another plan")
    arguments = ["deduplicate", "--input", *corpus, "--output", str(tmp_path / "out")]
    assert main([*arguments, "--workers", "0"]) in (1, 2)
    with JobFolder(tmp_path / "out").locked():
        assert main([*arguments, "--workers", "0", "--restart"]) == 1
    assert main([*arguments, "--workers", "0", "--restart"]) == 0


@pytest.mark.parametrize("command", ["deduplicate", "split"])
def test_nothing_of_the_users_is_removed(tmp_path, cli, capsys, command):
    """Folders that look like ours, and an output that holds the input."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    texts = [{"text": f"document number {number}"} for number in range(400)]
    source = Path(write_jsonl(corpus / "c.jsonl", texts))
    for name in ("out.unfinished", "out.done"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    call = [command, "--input", str(corpus), "--workers", "0", "--output"]
    for restart in ([], ["--restart"]):
        assert "holds notes.txt and no plan.json" in cli.errors(
            2, *call, str(tmp_path / "out"), *restart
        )
    (tmp_path / "out.unfinished" / "notes.txt").rename(tmp_path / "notes.txt")
    assert main([*call, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out.done" / "notes.txt").read_text() == "mine"
    for output in (corpus, tmp_path):
        assert f"holds the input {source}" in cli.errors(2, *call, str(output), "--force")
    # Inside the input it is not part of it, neither while it is made nor when it is done.
    capsys.readouterr()
    first = cli(*call, str(corpus / "out"))
    (corpus / "out.unfinished").mkdir()
    (corpus / "out.unfinished" / "plan.json").write_text("{}")
    assert cli(*call, str(corpus / "out")) == first
    assert len(read_jsonl(source)) == 400


def test_a_result_is_read_without_its_reports(tmp_path):
    texts = [{"text": f"document number {number // 2}"} for number in range(400)]
    write_jsonl(tmp_path / "c.jsonl", [*texts, {"text": ""}])
    run([str(tmp_path / "c.jsonl")], tmp_path / "out")
    names = [Path(source.path).name for source in find_sources([str(tmp_path / "out")])]
    assert names == ["part-000000.jsonl"]
    assert len(list((tmp_path / "out").iterdir())) == 5


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cut_file_is_an_error_but_not_the_end(tmp_path, cli, workers):
    texts = distinct_texts(3000)
    content = gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(content[: len(content) - 100])
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "good"}])
    arguments = ["deduplicate", "--input", str(tmp_path / "cut.jsonl.gz"), good]
    arguments += ["--output", str(tmp_path / "out"), "--workers", str(workers), "--exact-only"]
    assert f"; damaged: {tmp_path / 'cut.jsonl.gz'}; they are" in cli.errors(1, *arguments)
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--max-bad-fraction", "0.001"]) == 0
    (line,) = read_jsonl(tmp_path / "out" / "quarantine.jsonl")
    assert line["file"].endswith("cut.jsonl.gz")


def test_nothing_to_read(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": " "}])
    with pytest.raises(DataError, match="no documents with words"):
        run([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_disk_is_one_line(corpus, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stages, "fsync_path", full)
    with pytest.raises(DataError, match="No space left on device; is the disk full"):
        run(corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_units_cover_the_files_once(corpus):
    sources = find_sources(corpus)
    assert len(plan_units(sources, UNIT_BYTES)) == 1
    ranges = [each for unit in plan_units(sources, 5_000) for each in unit.ranges]
    for number in range(3):
        mine = [each for each in ranges if each.source == number]
        assert mine[0].begin == 0
        assert all(a.end == b.begin for a, b in zip(mine, mine[1:], strict=False))
        assert mine[-1].end > sources[number].size_bytes


def test_plan_prints_without_working(corpus, tmp_path, cli):
    arguments = ["deduplicate", "--input", *corpus, "--output", str(tmp_path / "out"), "--estimate"]
    output = cli(*arguments)
    for word in ("text", "time", "disk", "memory", "25 bands of 5"):
        assert word in output
    assert not list(tmp_path.glob("out*"))
    text_bytes, documents, *_ = sample(find_sources(corpus), ReadOptions())
    assert abs(documents - 240) < 1
    assert abs(text_bytes / sum(os.path.getsize(path) for path in corpus) - 1) < 0.01


def test_the_time_is_divided_by_nodes_and_workers(corpus, tmp_path, cli):
    arguments = ["deduplicate", "--input", *corpus, "--output", str(tmp_path / "out"), "--estimate"]
    needed = needs(1e12, 2.1e8, Settings(), 64)
    for nodes in (1, 16):
        assert f"with {nodes} x 64 workers" in cli(
            *arguments, "--workers", "64", "--nodes", str(nodes)
        )
        described = describe_needs(Sample(1e12, 2.1e8, [], 0), needed, nodes, 64)
        parallel = needed.processor_seconds - needed.serial_seconds
        minutes = (parallel / (64 * nodes) + needed.serial_seconds) / 60
        assert f"; {minutes:,.1f} minutes with" in described


def test_the_last_line_of_a_stage_says_that_it_is_done(corpus, tmp_path, capsys):
    arguments = ["deduplicate", "--input", *corpus, "--output", str(tmp_path / "out")]
    assert main([*arguments, "--workers", "0"]) == 0
    lines = [line.split(",")[0].split() for line in capsys.readouterr().err.splitlines()]
    assert [stage for _, stage, _ in lines] == [
        "sign", "exact", "mark", "candidates", "estimate", "needed", "collect", "verify",
        "resolve", "write", "check",
    ]  # fmt: skip
    assert all(share == "100%" for _, _, share in lines)


@pytest.mark.parametrize("command", ["deduplicate", "split"])
def test_standard_input(corpus, tmp_path, capsys, monkeypatch, command):
    content = Path(corpus[0]).read_bytes()

    def call(*options: str) -> int:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        arguments = [command, "--input", "-", "--output", str(tmp_path / "out"), "--workers", "0"]
        return main([*arguments, *fraction, *options])

    fraction = ["--fraction", "0.3"] if command == "split" else []
    arguments = [command, "--input", corpus[0], "--output", str(tmp_path / "file"), *fraction]
    assert main([*arguments, "--workers", "0"]) == 0
    assert call("--keys", "body") == 2
    assert not unfinished_folder(tmp_path / "out").exists()
    assert call() == call() == 0
    assert not unfinished_folder(tmp_path / "out").exists()
    parts = [
        {name: text for name, text in contents(tmp_path / folder).items() if "part-" in name}
        for folder in ("file", "out")
    ]
    assert parts[0]
    assert parts[0] == parts[1]
    assert read_summary(tmp_path / "out")["sources"] == ["standard input"]
    # It goes on with what a killed run has kept.
    monkeypatch.setattr("megatron_deberta.text.jobs.stages._publish", interrupt)
    assert call("--force", "--compress", "gz") == 130
    assert list(unfinished_folder(tmp_path / "out").glob("standard-input-*"))
    monkeypatch.undo()
    assert call("--force", "--compress", "gz") == 0
    if command == "deduplicate":
        assert call("--estimate") == 2
        assert "--estimate needs files" in capsys.readouterr().err


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.skipif(not CORPUS.exists(), reason=f"{CORPUS} is not there")
def test_quality_on_planted_pairs(tmp_path):
    run([str(CORPUS / "dedup_eval.jsonl.gz")], tmp_path / "out")
    with gzip.open(CORPUS / "dedup_eval.jsonl.gz") as stream:
        names = [json.loads(line)["id"] for line in stream]
    removed = {names[line["document"]] for line in read_jsonl(tmp_path / "out" / "removed.jsonl")}
    found: dict[str, list[bool]] = {}
    planted = set()
    with (CORPUS / "dedup_eval.truth.tsv").open() as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            pair = {row["original"], row["duplicate"]}
            planted |= pair
            if row["kind"] != "edit3" or float(row["jaccard_5gram"]) >= 0.7:
                found.setdefault(row["kind"], []).append(bool(pair & removed))
    assert all(found["exact"])
    assert all(found["case"])
    assert np.mean(found["edit1"]) >= 0.99
    assert len(found["edit3"]) > 100
    assert np.mean(found["edit3"]) >= 0.85
    assert not removed - planted
