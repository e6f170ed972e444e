"""Command ``fill-mask`` with ``--prior-weight``."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_deberta.cli.fill_mask import read_penalty
from megatron_deberta.cli.main import main
from megatron_deberta.data.shards.writer import write_shard
from megatron_deberta.hf.fill_mask import open_filler
from tests.support.tiny_models import V2, tiny_tokenizer
from tests.support.tiny_runs import save_run

TEXT = "The quick brown [MASK] jumps"


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert main(["fill-mask", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def predicted(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[tuple[float, str]]:
    """Return probabilities and tokens that ``fill-mask`` prints."""
    assert main(["fill-mask", *arguments]) == 0
    rows = re.findall(r"^ (\d\.\d{4}) +(\S+) *$", capsys.readouterr().out, re.MULTILINE)
    return [(float(probability), token) for probability, token in rows]


def test_prior_weight_divides_by_the_frequency_in_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    save_run(V2, run_dir, tmp_path / "tokenizer")
    tokenizer = tiny_tokenizer()
    filler = open_filler(run_dir)
    (plain,) = filler.fill(TEXT, top_k=tokenizer.num_tokens)
    counts = torch.ones(tokenizer.num_tokens)
    common = [each.token_id for each in plain if each.token_id not in tokenizer.special_ids][:9]
    documents = [np.array([token] * (99 - 9 * rank)) for rank, token in enumerate(common)]
    for document in documents:
        counts[document[0]] += document.size
    # Where the run says that its data are
    shard = tmp_path / "shards" / "books"
    named = {"tokenizer_fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    write_shard(str(shard), documents, np.uint16, **named)
    monkeypatch.chdir(tmp_path)

    scores = torch.zeros(tokenizer.num_tokens)
    for each in plain:
        scores[each.token_id] = each.probability
    scores *= (counts / counts.sum()) ** -0.5
    scores[list(tokenizer.special_ids)] = 0
    best = (scores / scores.sum()).topk(5)
    expected = [
        (round(value, 4), tokenizer.decode([token]).strip() or tokenizer.piece(token))
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    assert expected[0][1] != plain[0].text.strip()
    weighted = [str(run_dir), TEXT, "--prior-weight", "0.5"]
    found = predicted(weighted, capsys)
    assert [token for _, token in found] == [token for _, token in expected]
    assert [p for p, _ in found] == pytest.approx([p for p, _ in expected], abs=2e-4)

    penalty = read_penalty(filler, 0.5, [])
    assert penalty is not None
    assert penalty.isinf().nonzero().flatten().tolist() == list(tokenizer.special_ids)

    out = tmp_path / "out"
    assert main(["convert", "--checkpoint", str(run_dir), "--output", str(out)]) == 0
    capsys.readouterr()
    weighted[0] = str(out)
    assert "give the shards with --prior-shards" in error_of(weighted, capsys, 2)
    assert predicted([*weighted, "--prior-shards", f"{shard}.idx"], capsys) == found
    write_shard(str(shard), documents, np.uint16, **named | {"tokenizer_fingerprint": "f" * 64})
    assert "another tokenizer" in error_of([*weighted, "--prior-shards", str(shard)], capsys, 2)
    for file in shard.parent.iterdir():
        file.unlink()
    message = error_of([*weighted, "--prior-shards", str(shard)], capsys, 2)
    assert "books.idx: No such file" in message
    assert "at least 0" in error_of([*weighted[:-1], "-0.5"], capsys, 2)
