"""Validation documents: how many, which, and that none has a copy in training."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.text.deduplicate.shingles import digest_of
from megatron_deberta.text.deduplicate.sign import Settings
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.readers.checks import SIDES
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.text.split import find_cluster, split
from tests.support.duplicates import contents, read_jsonl, run, with_run_options, write_jsonl


def parted(inputs, output, **options):
    return split(find_sources(inputs), output, ReadOptions(), **with_run_options(options))


def names(folder: Path) -> list[str]:
    return [r["id"] for path in sorted(folder.glob("part-*")) for r in read_jsonl(path)]


def leaks(output: Path, folder: Path) -> int:
    """Deduplicate across both sides; count the pairs of which one is on each."""
    sides = [sorted(str(path) for path in (output / s).iterdir()) for s in ("train", "validation")]
    run([*sides[0], *sides[1]], folder)
    return sum(
        Path(line["file"]).parent != Path(line["kept"]["file"]).parent
        for line in read_jsonl(folder / "removed.jsonl")
    )


@pytest.fixture
def many(tmp_path):
    records = [{"id": n, "text": f"document number {n}"} for n in range(4000)]
    return [write_jsonl(tmp_path / "many.jsonl", records)]


def test_five_percent_on_average(many, tmp_path):
    summary = parted(many, tmp_path / "out", unit_bytes=40_000)
    assert summary["documents"] == 4000 == summary["train"] + summary["validation"]
    # Four standard deviations.
    assert abs(summary["validation"] - 200) < 4 * 13.8
    train, validation = (names(tmp_path / "out" / side) for side in ("train", "validation"))
    assert sorted(train + validation) == list(range(4000))
    assert train == sorted(train)


@pytest.mark.parametrize("command", ["split", "deduplicate", "preprocess"])
def test_array_task_that_is_not_the_last_says_that_nothing_is_published(
    command, many, tokenizer_dir, tmp_path, cli, capsys
):
    output = tmp_path / "out"
    arguments = [command, "--input", *many, "--output", str(output), "--workers", "0"]
    arguments += ["--tokenizer", tokenizer_dir] if command == "preprocess" else []
    with JobFolder(output).locked(shared=True):
        assert main([*arguments, "--array-task", "0/2"]) == 0
        said = f"{output}: this task is done, but nothing is published yet"
        assert said in capsys.readouterr().out
        assert [path.name for path in tmp_path.glob("out*")] == ["out.unfinished"]
    assert ": 4,000 documents" in cli(*arguments, "--array-task", "1/2")
    assert not (tmp_path / "out.unfinished").exists()
    assert list(tmp_path.glob("out*"))


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_result_without_a_file_is_not_taken_for_whole(damage, many, tmp_path, cli):
    output = tmp_path / "out"
    arguments = ["split", "--input", *many, "--output", str(output), "--workers", "0"]
    assert main(arguments) == 0
    assert main(arguments) == 0
    (part,) = (output / "train").iterdir()
    content = part.read_bytes()
    part.write_bytes(content[:-9]) if damage == "cut" else part.unlink()
    assert f"{part} is missing or cut off since the result was pub" in cli.errors(2, *arguments)
    assert main([*arguments, "--force"]) == 0
    assert part.read_bytes() == content


def test_other_commands_do_not_mix_the_sides_unnoticed(many, tmp_path, cli, capsys, caplog):
    output = tmp_path / "out"
    parted(many, output)
    arguments = ["--input", str(output), "--output", str(tmp_path / "other")]
    message = cli.errors(2, "deduplicate", *arguments, "--workers", "0")
    assert f"{output / 'train'} and {output / 'validation'} are the two sides of a split" in message
    assert not list(tmp_path.glob("other*"))
    assert main(["train-tokenizer", *arguments, "--vocab-size", "60"]) == 0
    assert f"validation text ({output / 'validation'})" in caplog.text
    printed = capsys.readouterr().out
    assert "60 pieces and [MASK]; set model.vocab_size to auto, or to at least 61" in printed
    caplog.clear()
    train = ["--input", str(output / "train"), "--output", str(tmp_path / "second")]
    assert main(["train-tokenizer", *train, "--vocab-size", "60"]) == 0
    assert not caplog.text


@pytest.mark.parametrize("command", ["deduplicate", "split", "preprocess", "train-tokenizer"])
@pytest.mark.parametrize("name", ["absent.jsonl", "absent-*.jsonl"])
def test_input_that_does_not_exist_is_a_usage_error(command, name, tmp_path, cli):
    arguments = ["--input", str(tmp_path / name), "--output", str(tmp_path / "out")]
    arguments += ["--tokenizer", "unused"] if command == "preprocess" else []
    assert name in cli.errors(2, command, *arguments)


def test_a_document_keeps_its_side(many, tmp_path):
    parted(many, tmp_path / "one")
    parted(many, tmp_path / "two", workers=2, unit_bytes=50_000)
    validation = names(tmp_path / "one" / "validation")
    assert names(tmp_path / "two" / "validation") == validation
    half = read_jsonl(Path(many[0]))[::-2]
    parted([write_jsonl(tmp_path / "half.jsonl", half)], tmp_path / "three")
    assert sorted(names(tmp_path / "three" / "validation")) == [n for n in validation if n % 2]
    parted(many, tmp_path / "four", seed=1)
    assert set(names(tmp_path / "four" / "validation")) != set(validation)


def test_clusters_keep_near_copies_together(corpus, tmp_path):
    """Without clusters some pairs are parted, so the proof by deduplication can fail."""
    run(corpus, tmp_path / "clean")
    parted(corpus, tmp_path / "leaky", fraction=0.4)
    assert leaks(tmp_path / "leaky", tmp_path / "across1") > 5
    parted(corpus, tmp_path / "tight", fraction=0.4, clusters=tmp_path / "clean")
    assert leaks(tmp_path / "tight", tmp_path / "across2") == 0
    removed = json.loads((tmp_path / "across2" / "summary.json").read_text())["removed"]
    assert removed == {"exact": 40, "near": 40}


def test_clusters_that_do_not_fit_are_refused(corpus, tmp_path, caplog):
    """With them the split would leak, and say nothing."""
    run(corpus, tmp_path / "exact", settings=Settings(exact_only=True))
    with pytest.raises(ConfigError, match="made with --exact-only"):
        parted(corpus, tmp_path / "out", clusters=tmp_path / "exact")
    run(corpus, tmp_path / "clean")
    for options, name in (
        (ReadOptions(keys=("text", "id")), "keys"),
        (ReadOptions(normalization="nfc"), "normalization"),
    ):
        with pytest.raises(ConfigError, match=f"made with {name}"):
            split(find_sources(corpus), tmp_path / "out", options, clusters=tmp_path / "clean")
    others = [{"text": f"of another corpus {n}"} for n in range(50)]
    other = write_jsonl(tmp_path / "other.jsonl", others)
    with pytest.raises(DataError, match="none of its 40 documents is in --input"):
        parted([other], tmp_path / "out", fraction=0.5, clusters=tmp_path / "clean")
    assert [path.name for path in tmp_path.glob("*out*")] == []
    parted(corpus[:2], tmp_path / "part", fraction=0.4, clusters=tmp_path / "clean")
    assert "documents of --clusters are in --input" in caplog.text
    caplog.clear()
    parted(corpus, tmp_path / "whole", fraction=0.4, clusters=tmp_path / "clean")
    assert not caplog.text
    for damage in (b"garbage", b""):
        (tmp_path / "clean" / "clusters.npy").write_bytes(damage)
        with pytest.raises(DataError, match="missing or damaged"):
            parted(corpus, tmp_path / "out", clusters=tmp_path / "clean")
    np.save(tmp_path / "clean" / "clusters.npy", np.zeros((4, 2)))
    with pytest.raises(DataError, match="damaged"):
        parted(corpus, tmp_path / "out", clusters=tmp_path / "clean")


def test_what_deduplicate_left_does_not_leak(corpus, tmp_path):
    run(corpus, tmp_path / "clean")
    kept = sorted(str(path) for path in (tmp_path / "clean").glob("part-*"))
    parted(kept, tmp_path / "out", fraction=0.4)
    assert leaks(tmp_path / "out", tmp_path / "across") == 0


def test_clusters_are_found_by_digest():
    digests = sorted(digest_of(f"text {n}") for n in range(9))
    rows = np.array([np.frombuffer(d * 2, "<u8") for d in digests], np.uint64)
    rows[:, 2:] = np.frombuffer(digests[0], "<u8")
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    assert all(find_cluster(rows, digest) == digests[0] for digest in digests)
    other = digest_of("something else")
    assert find_cluster(rows, other) == other
    assert find_cluster(rows[:0], other) == other


def test_command(corpus, tmp_path, cli):
    output = tmp_path / "out"
    arguments = ["split", "--input", *corpus, "--output", str(output), "--workers", "0"]
    printed = cli(*arguments, "--fraction", "0.2")
    assert "240 documents = " in printed
    sizes = [
        sum(p.stat().st_size - p.read_bytes().count(b"\n") for p in (output / side).iterdir())
        for side in SIDES
    ]
    assert f"{sizes[1] / sum(sizes):.2%} of the bytes" in printed
    first = contents(output)
    assert main([*arguments, "--fraction", "0.2"]) == 0
    assert contents(output) == first
    assert main([*arguments, "--fraction", "0.3"]) == 2
    assert main([*arguments, "--fraction", "0.3", "--force"]) == 0
    assert contents(output) != first
    assert main([*arguments, "--fraction", "1.5"]) == 2
    assert "give --clusters a folder that deduplicate wrote" in cli.errors(
        1, *arguments, "--force", "--clusters", str(tmp_path)
    )


def test_a_side_without_documents_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "one"}])
    with pytest.raises(DataError, match="no document is on the side of"):
        parted([path], tmp_path / "out")
    # Nor is there unfinished work, which would refuse another seed.
    assert [each.name for each in tmp_path.iterdir()] == ["c.jsonl"]
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        parted([path], tmp_path / "out", fraction=0)
    with pytest.raises(ConfigError, match="must fit 64 bits"):
        parted([path], tmp_path / "out", seed=2**63)
