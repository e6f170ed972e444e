"""``inspect data`` and ``verify`` on shards of real words."""

import hashlib
import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from megatron_deberta.cli.main import main
from megatron_deberta.config import load_config
from megatron_deberta.config.phases import segments
from megatron_deberta.data.build import open_corpora, train_loader
from megatron_deberta.data.shards.manifest import read_manifest
from megatron_deberta.data.shards.writer import write_shard
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.tokenizer import load_tokenizer

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"]


@pytest.fixture
def tokenizer_file(tmp_path):
    backend = Backend(models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    backend.train_from_iterator(
        TEXT * 3,
        trainers.BpeTrainer(vocab_size=90, special_tokens=specials, show_progress=False),
    )
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return str(path)


@pytest.fixture
def shard(tmp_path, tokenizer_file):
    return write_lines(tmp_path / "shard", tokenizer_file, [[line] for line in TEXT])


@pytest.fixture
def sentence_shard(tmp_path, tokenizer_file):
    return write_lines(tmp_path / "shard_sentence", tokenizer_file, [TEXT, TEXT[::-1] * 2])


def write_lines(prefix, tokenizer_file, documents):
    """Forty times the documents, lists of sentences."""
    tokenizer = load_tokenizer(tokenizer_file)
    prefix = str(prefix)
    encoded = [[tokenizer.encode_array(line) for line in document] for document in documents]
    write_shard(
        prefix,
        40 * encoded,
        np.uint16,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_path=tokenizer_file,
        vocab_size=tokenizer.vocab_size,
    )
    return prefix


def test_inspect_marks_every_target(shard, cli):
    arguments = ["inspect", "data", "--prefix", shard, "--num-samples", "2", "--statistics", "50"]
    output = cli(*arguments, "data.sequence_length=64", "objective.max_span_words=1")
    assert "80 documents" in output
    head = r"sample \d+: (\d+) tokens, \d+ documents, (\d+) targets.*\n"
    samples = re.findall(head + r"((?:  \d\| .*\n)+)", output)
    assert len(samples) == 2
    for _, targets, text in samples:
        assert len(re.findall(r"\{[^{}]+(?:>[^{}]+|=)\}", text)) == int(targets) == 10
        text = re.sub(r"\n?  \d\| ", "", text).strip()
        assert text.startswith("[CLS]")
        assert text.endswith("[SEP]")
        assert re.search(r"\{\w+>\[MASK\]\}", text)
        unmasked = re.sub(r"\{(\w+)(?:>[^{}]+|=)\}", r"\1", text)
        assert " ".join(TEXT[0].split()[3:6]) in unmasked
    assert re.search(r"targets +15\.\d+% of tokens", output)
    assert re.search(r"\[MASK\] [78]\d\.\d%", output)


def test_inspect_shows_rows_of_the_length_asked_for(shard, cli):
    arguments = ["inspect", "data", "--prefix", shard, "--num-samples", "1", "--statistics", "1"]
    assert " of 24\n" in cli(*arguments, "--sequence-length", "24")


@pytest.mark.parametrize("end", ["", ".idx", ".bin", "folder"])
def test_inspect_data_takes_shards_as_every_command_does(shard, end, cli):
    options = ["--num-samples", "1", "--statistics", "1", "data.sequence_length=24"]
    expected = cli("inspect", "data", "--prefix", shard, *options)
    name = str(Path(shard).parent) if end == "folder" else f"{shard}{end}"
    assert cli("inspect", "data", name, *options) == expected


def test_inspect_prints_pieces_as_text(tmp_path, cli):
    """Also the piece of a space alone, which is no mark of a word."""
    folder = Path(__file__).parents[2] / "golden/c6955b0"
    shard, tokenizer = folder / "shards/docs_text_document.bin", folder / "tokenizer"
    arguments = ["--prefix", str(shard), "--tokenizer", str(tokenizer), "--num-samples", "4"]
    output = cli("inspect", "data", *arguments, "--sequence-length", "64")
    assert "\u2581" not in output
    assert re.search(r"\{\u2423(>\[MASK\]|=)\}", output)
    assert "as they have mirrored themselves in my mind. The" in output
    output = cli("inspect", "shards", str(shard), *arguments[2:])
    assert "%  ' the'" in output
    assert "\u2581" not in output


def test_inspect_reads_a_run(shard, tmp_path, cli):
    run = tmp_path / "run.yaml"
    run.write_text(f"data: {{train: ['{shard}'], sequence_length: 32}}\n")
    assert "training: 72 documents" in cli(
        "inspect", "data", str(run), "data.validation_fraction=0.1"
    )


def test_inspect_shows_the_rows_that_training_sees(shard, tokenizer_file, tmp_path, cli):
    """The shorter ones at first among them."""
    run = tmp_path / "run.yaml"
    sizes = "sequence_length: 32, short_sequence_length: 16, short_steps: 2, num_workers: 0"
    run.write_text(
        f"data: {{train: ['{shard}'], {sizes}}}\n"
        f"tokenizer: {{path: '{tokenizer_file}'}}\n"
        f"train: {{global_batch_size: 4, micro_batch_size: 4, run_dir: '{tmp_path}/run'}}\n"
    )
    arguments = ["inspect", "data", str(run), "--num-samples", "12", "--statistics", "12"]
    output = cli(*arguments)
    head = r"sample \d+: (\d+) tokens, .*, (\d+) targets.*\n"
    shown = re.findall(head + r"((?:  \d\| .*\n)+)", output)
    assert len(shown) == 12
    tokenizer = load_tokenizer(tokenizer_file)
    config, vocabulary = load_config(str(run), []), Vocabulary.of(tokenizer)
    corpora = open_corpora(config, vocabulary, hashes=False)
    steps = []
    for part in segments(config):
        loader = train_loader(part.config, vocabulary, 0, 1, part.first_sample, corpora, part.stage)
        steps += islice(loader, min(part.steps, 3 - len(steps)))
    rows = []
    for (batch,) in steps:
        for row in range(4):
            tokens = batch.inputs.input_ids[row][batch.inputs.is_token[row]].clone()
            places = batch.masked_positions[row]
            labels = batch.labels[row][places >= 0]
            tokens[places[places >= 0]] = labels
            text = "".join(map(tokenizer.piece, tokens.tolist())).replace("\u2581", "")
            rows.append((str(tokens.numel()), str(labels.numel()), text))
    # A separator that meets a row's edge is left out.
    assert {int(size) for size, _, _ in rows[:8]} <= {15, 16}
    assert {int(size) for size, _, _ in rows[8:]} <= {31, 32}
    originals = [
        (size, targets, re.sub(r"\{([^{}]+?)(?:>[^{}]+|=)\}|  \d\| |\s", r"\1", text))
        for size, targets, text in shown
    ]
    assert [
        (size, targets, text.replace("\u2423", "")) for size, targets, text in originals
    ] == rows
    assert re.search(r"over 8 samples:\n  tokens a row +1[56].\d of 16\n", output)
    assert re.search(r"over 4 samples:\n  tokens a row +3[12].\d of 32\n", output)


def test_inspect_shards_decodes(shard, cli):
    output = cli("inspect", "shards", shard, "--num-samples", "1", "--top", "2")
    # This backend has no decoder, so the marks of words' begins stay in whole texts.
    assert f"document 0 (9 tokens):\n  {TEXT[0]}\n" in output.replace("\u2581", "")
    assert re.search(r"most frequent of 680 tokens \(\d+ of 84 ids come\)", output)
    assert re.search(r"^ +\d+ +\d+\.\d{3}%  ' ?\w+'$", output, re.M)
    assert "unknown: 0.0000%" in output


def test_inspect_shards_refuses_another_tokenizer(shard, tmp_path, tokenizer_file, cli):
    other = tmp_path / "other.json"
    content = json.loads(Path(tokenizer_file).read_text())
    other.write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    mine, another = (load_tokenizer(str(path)).fingerprint for path in (tokenizer_file, other))
    assert mine != another
    message = cli.errors(1, "inspect", "shards", shard, "--tokenizer", str(other))
    assert f"the shard was made with another tokenizer: fingerprint {another[:12]} " in message
    assert f"manifest {mine[:12]} " in message
    second = write_lines(tmp_path / "second", str(other), [[line] for line in TEXT])
    for given in ([], ["--tokenizer", tokenizer_file]):
        message = cli.errors(1, "inspect", "shards", shard, second, *given)
        assert f"{second}: the tokenizer is not that of {shard}: fingerprint {another} " in message
        assert f"there {mine} " in message
    # Without a manifest nothing can be compared.
    Path(f"{second}.manifest.json").unlink()
    assert main(["inspect", "shards", second, "--tokenizer", tokenizer_file]) == 0


def test_inspect_refuses(shard, tmp_path, cli, capsys):
    assert "give a run file or a shard" in cli.errors(2, "inspect", "data")
    assert main(["inspect", "data", "--prefix", str(tmp_path / "absent"), "--tokenizer", "x"]) == 2
    assert main(["inspect", "data", "--prefix", shard, "--num-samples", "-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_verify_says_what_a_shard_is(shard, tokenizer_file, cli):
    assert re.search(
        r"good: 80 documents, .* hashes as recorded",
        cli("verify", "--prefix", shard, "--tokenizer", tokenizer_file),
    )


def test_verify_without_manifest_checks_ids_against_the_tokenizer(shard, tokenizer_file, cli):
    Path(f"{shard}.manifest.json").unlink()
    assert "hashes not checked" in cli("verify", "--prefix", shard, "--tokenizer", tokenizer_file)


def damage_tokens(prefix):
    with open(f"{prefix}.bin", "r+b") as stream:
        stream.write(b"\xff\xff")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: damage_tokens(p), "SHA-256"),
        (
            lambda p: (damage_tokens(p), Path(f"{p}.manifest.json").unlink()),
            "byte 0: id 65535 (token 0 of document 0) is outside the vocabulary of ",
        ),
        (lambda p: Path(f"{p}.bin").write_bytes(b"\x05\x00"), "truncated"),
        (lambda p: Path(f"{p}.idx").unlink(), "No such file"),
        (lambda p: Path(f"{p}.manifest.json").write_text("{"), "not a shard manifest"),
    ],
)
def test_verify_names_damage_and_continues(
    shard, tmp_path, tokenizer_file, capsys, damage, message
):
    good = str(tmp_path / "good")
    for suffix in (".bin", ".idx", ".manifest.json"):
        Path(good + suffix).write_bytes(Path(shard + suffix).read_bytes())
    damage(shard)
    arguments = ["verify", "--tokenizer", tokenizer_file, "--prefix", shard, "--prefix", good]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert f"{good}: good" in captured.out
    assert message in captured.err
    *problems, total = captured.err.splitlines()
    assert all(line.startswith(f"{shard}: BAD: {shard}") for line in problems)
    assert total == "1 of 2 shards are damaged"


def test_verify_takes_folders_and_files_and_any_number_of_threads(shard, tmp_path, cli):
    whole = cli("verify", str(tmp_path), "--jobs", "3")
    assert cli("verify", f"{shard}.bin", f"{shard}.idx", "--jobs", "1") == whole
    assert main(["verify"]) == 2
    (tmp_path / "none").mkdir()
    assert "no shards (*.idx) in this folder" in cli.errors(2, "verify", str(tmp_path / "none"))


@pytest.mark.parametrize("left", [".bin", ".manifest.json"])
def test_verify_of_a_folder_names_a_shard_without_its_index(shard, tmp_path, cli, capsys, left):
    (tmp_path / f"cut{left}").write_bytes(Path(shard + left).read_bytes())
    assert main(["verify", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert f"{shard}: good" in captured.out
    problem, total = captured.err.splitlines()
    assert problem.startswith(f"{tmp_path}/cut: BAD: {tmp_path}/cut.idx: No such file")
    assert total == "1 of 2 shards are damaged"
    assert f"{tmp_path}/cut.idx: No such file" in cli.errors(1, "inspect", "shards", str(tmp_path))


def test_verify_reads_the_quarantine(shard, tmp_path, cli):
    for suffix in (".bin", ".idx", ".manifest.json"):
        Path(shard + suffix).rename(f"{tmp_path}/my_books_long_key_document{suffix}")
    digest = hashlib.sha256(b"{}\n").hexdigest()
    path = edit_manifest(tmp_path / "my_books_long_key_document", quarantine_sha256=digest)
    # Without the list the shard itself is as good as before.
    assert cli("verify", str(path)).endswith("; quarantine list missing\n")
    (tmp_path / "my_books.quarantine.jsonl").write_bytes(b"{}\n")
    assert main(["verify", str(path)]) == 0
    (tmp_path / "my_books.quarantine.jsonl").write_bytes(b"[]\n")
    assert "my_books.quarantine.jsonl: SHA-256" in cli.errors(1, "verify", str(path))


def test_verify_reports_another_tokenizer(shard, tokenizer_file, cli):
    edit_manifest(shard, tokenizer_fingerprint="another")
    assert "made with tokenizer another" in cli.errors(
        1, "verify", "--prefix", shard, "--tokenizer", tokenizer_file
    )


def edit_manifest(prefix, **fields):
    """Change fields of a shard's manifest and return its path."""
    path = Path(f"{prefix}.manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


COUNTED = {
    "documents_in": 90,
    "documents_empty": 7,
    "documents_quarantined": 3,
    "plan_sha256": "ab",
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (COUNTED, ""),
        (COUNTED | {"documents_in": 91}, r"documents_in 91 is not num_documents 80 \+ "),
        (COUNTED | {"documents_empty": 8}, r"documents_in 90 is not .* documents_empty 8 \+ "),
        ({**COUNTED, "documents_in": 0}, "documents_in 0 is not "),
        (COUNTED | {"vocab_size": 65_500}, "vocab_size 65500 does not fit dtype uint16"),
        # Merged of shards with counts and without: fewer records than documents.
        (COUNTED | {"documents_in": 50, "plan_sha256": ""}, ""),
        (COUNTED | {"documents_in": 91, "plan_sha256": ""}, "documents_in 91 is not"),
        ({"vocab_size": 65_536}, ""),
        ({"vocab_size": 65_537}, "vocab_size 65537 does not fit dtype uint16"),
    ],
)
def test_verify_compares_a_manifest_with_itself(shard, capsys, fields, message):
    path = edit_manifest(shard, **fields)
    assert main(["verify", shard]) == bool(message)
    if message:
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{shard}: BAD: {path}: ")
        assert re.search(message, line)


def test_verify_compares_the_tokenizers_size(shard, tokenizer_file, capsys):
    own = read_manifest(shard).vocab_size
    edit_manifest(shard, vocab_size=1000)
    assert main(["verify", shard]) == 0
    assert main(["verify", shard, "--tokenizer", tokenizer_file]) == 1
    message = f"vocab_size 1000 is not the tokenizer's {own}"
    assert message in capsys.readouterr().err


def test_inspect_shows_pairs(sentence_shard, cli):
    pairs = ["data.packing=segment_pair", "model.next_sentence_head=true"]
    arguments = ["inspect", "data", "--prefix", sentence_shard, "--num-samples", "6"]
    sizes = ["model.type_vocab_size=2", "data.sequence_length=48"]
    output = cli(*arguments, *pairs, *sizes)
    heads = re.findall(
        r"sample \d+: (\d+) tokens, segments of (\d+) and (\d+), (.*), \d+ t", output
    )
    assert len(heads) == 6
    assert all(int(size) == int(first) + int(second) for size, first, second, _ in heads)
    kinds = {kind for *_, kind in heads}
    assert kinds <= {"the second from elsewhere (label 1)", "in sequence (label 0)"}
    assert len(re.findall(r"^  A\| \[CLS\].*\[SEP\]$", output, re.M)) == 6
    assert len(re.findall(r"^  B\| .*\[SEP\]$", output, re.M)) == 6
    assert re.search(r"in sequence +\d+\.\d% of pairs", output)


@pytest.fixture
def two_outputs(shard, tmp_path):
    """Shards and lists of the outputs ``books`` and ``books_clean``."""

    def put(name: str, run: str, content: bytes | None) -> Path:
        for suffix in (".bin", ".idx"):
            Path(f"{tmp_path}/{name}{suffix}").write_bytes(Path(shard + suffix).read_bytes())
        fields = json.loads(Path(f"{shard}.manifest.json").read_text())
        fields |= {
            "plan_sha256": run,
            "documents_in": fields["num_documents"],
            "quarantine_sha256": hashlib.sha256(run.encode()).hexdigest(),
        }
        Path(f"{tmp_path}/{name}.manifest.json").write_text(json.dumps(fields))
        output = name.partition("_t")[0]
        if content is not None:
            Path(f"{tmp_path}/{output}.quarantine.jsonl").write_bytes(content)
        return tmp_path / name

    return put


def test_verify_does_not_take_another_outputs_quarantine(two_outputs, cli, capsys):
    books = two_outputs("books_text_document", "one", b"one")
    clean = two_outputs("books_clean_text_document", "two", None)
    assert main(["verify", str(books), str(clean)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("hashes as recorded")
    assert second.endswith("hashes as recorded; quarantine list missing")
    # Nor when that one is damaged: the shard whose list it is says so.
    two_outputs("books_text_document", "one", b"damaged")
    assert main(["verify", str(clean)]) == 0
    assert main(["verify", str(books), str(clean)]) == 1
    (problem, _) = capsys.readouterr().err.splitlines()
    assert problem.startswith(f"{books}: BAD: ")
    # With its own there, that one counts.
    two_outputs("books_clean_text_document", "two", b"two")
    assert main(["verify", str(clean)]) == 0
    two_outputs("books_clean_text_document", "two", b"damaged")
    assert "books_clean.quarantine.jsonl: SHA-256" in cli.errors(1, "verify", str(clean))


def test_verify_takes_the_quarantine_that_several_keys_share(two_outputs, cli):
    two_outputs("books_text_document", "one", b"one")
    other = two_outputs("books_title_long_document", "one", b"damaged")
    assert "books.quarantine.jsonl: SHA-256" in cli.errors(1, "verify", str(other))
