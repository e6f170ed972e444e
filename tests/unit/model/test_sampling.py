"""Gumbel-max draws from softmax, whatever the order of rows and the split of categories."""

from __future__ import annotations

import torch

from megatron_deberta.model.sampling import GumbelMax

PIECES = 11


def draws(num: int, excluded: tuple[int, ...] = ()) -> GumbelMax:
    return GumbelMax.at(torch.tensor([5]), torch.arange(num).unsqueeze(0), excluded)


def test_frequencies_are_those_of_softmax() -> None:
    num = 40_000
    logits = torch.linspace(-4, 1, PIECES)
    drawn = draws(num)(logits.expand(num, PIECES))[1]
    expected = logits.double().softmax(0) * num
    counted = torch.bincount(drawn, minlength=PIECES).double()
    # Chi-squared with 10 degrees of freedom exceeds 35 with probability 1e-4.
    assert float(((counted - expected).square() / expected).sum()) < 35


def test_excluded_pieces_are_never_drawn() -> None:
    logits = torch.zeros(500, PIECES)
    drawn = draws(500, (0, 3))(logits)[1]
    assert set(drawn.tolist()) == set(range(PIECES)) - {0, 3}
    assert torch.equal(drawn, draws(500, (3, 0))(logits)[1])


def test_a_split_vocabulary_draws_the_same_pieces() -> None:
    logits = torch.randn(300, PIECES, generator=torch.Generator().manual_seed(0))
    draw = draws(300, (7,))
    whole, drawn = draw(logits)
    parts = [
        draw(logits[:, first:last], slice(None), first)
        for first, last in ((0, 4), (4, 11), (11, 11))
    ]
    maxima = torch.stack([part[0] for part in parts])
    winner = maxima.max(0, keepdim=True).indices
    assert torch.equal(maxima.max(0).values, whole)
    assert torch.equal(torch.stack([part[1] for part in parts]).gather(0, winner)[0], drawn)
    assert torch.equal(draw(logits[100:200], slice(100, 200))[1], drawn[100:200])


def test_rows_and_positions_have_their_own_noise() -> None:
    seeds, positions = torch.tensor([5, 6]), torch.arange(2000).expand(2, 2000)
    drawn = GumbelMax.at(seeds, positions)(torch.zeros(4000, PIECES))[1].view(2, 2000)
    assert 0.06 < float((drawn[0] == drawn[1]).double().mean()) < 0.12
    alone = GumbelMax.at(seeds[1:], positions[1:, 70:90])(torch.zeros(20, PIECES))[1]
    assert torch.equal(alone, drawn[1, 70:90])
