"""Blends: every source stays within one sample of its share, at every prefix and index."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from megatron_deberta.data.dataset import blend as blend_module
from megatron_deberta.data.dataset.blend import LONGEST_PERIOD, BlendedRows
from megatron_deberta.errors import ConfigError


def blend_of(weights):
    return BlendedRows([None] * len(weights), weights)


def prefix_counts(components, num_sources):
    return np.cumsum(components[:, None] == np.arange(num_sources), axis=0)


def largest_distance(weights, num_samples):
    """Of any source from its share, over all prefixes."""
    shares = np.asarray(weights) / np.sum(weights)
    components, local = blend_of(weights).locate(np.arange(num_samples))
    counts = prefix_counts(components, len(weights))
    own = counts[np.arange(num_samples), components]
    np.testing.assert_array_equal(local, own - 1)
    return np.abs(counts - shares * np.arange(1, num_samples + 1)[:, None]).max()


def random_weights(seed):
    draw = np.random.default_rng(seed)
    number = int(draw.integers(2, 9))
    kind = seed % 7 % 4
    if kind == 0:
        return draw.integers(1, 100, number).tolist()
    if kind == 1:
        return draw.dirichlet(np.ones(number)).clip(1e-3).tolist()
    if kind == 2:
        return np.round(draw.random(number) + 0.01, 2).tolist()
    # One large source and many equal small ones: what the largest-deficit rule gets wrong.
    return [float(number), *[1.0 + 1e-3 * k for k in range(number - 1)]]


@pytest.mark.parametrize("seed", range(14))
def test_every_source_is_within_one_sample_of_its_share(seed):
    assert largest_distance(random_weights(seed), 20_000) < 1.0


def test_decimals_repeat_exactly_and_far_indices_are_found_at_once():
    blend = blend_of([0.5, 0.3, 0.15, 0.05])
    assert blend.period == 20
    far = 10**12 + 7
    components, local = blend.locate(np.array([far]))
    near, _ = blend.locate(np.array([far % 20]))
    assert components == near
    share = [0.5, 0.3, 0.15, 0.05][int(components[0])]
    assert abs(local[0] + 1 - share * (far + 1)) < 1.0


@pytest.mark.parametrize(
    ("weights", "digest"),
    [
        ([1, 1], "883c883ac4f6eed5"),
        ([0.5, 0.3, 0.15, 0.05], "db89a29962f8b721"),
        ([0.7, 0.2, 0.1], "82401524b2d62161"),
        ([3, 1, 4, 1, 5, 9, 2, 6], "b3a6c267fd6e6636"),
        ([0.123, 0.456, 0.421], "57dd77577c2249c6"),
        ([500000, 300001, 200000], "18e01d9b66fa36c0"),
    ],
)
def test_short_patterns_are_unchanged(weights, digest):
    """Recorded: another order would change the samples of runs that are under way."""
    samples = np.concatenate([np.arange(5000), np.arange(10**10, 10**10 + 5000)])
    components, local = blend_of(weights).locate(samples)
    found = hashlib.sha256(components.tobytes() + local.tobytes()).hexdigest()
    assert found.startswith(digest)


def furthest_from_share(blend, weights, begin, end):
    """Of any source at any prefix of begin to end samples, exactly: in whole numbers."""
    fractions = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(fractions) for weight in fractions]
    components, local = blend.locate(np.arange(begin, end))
    furthest = Fraction(0)
    for number, share in enumerate(shares):
        places = np.flatnonzero(components == number)
        if not places.size:
            continue
        first = int(local[places[0]])
        counts = np.arange(first, first + places.size)
        np.testing.assert_array_equal(local[places], counts)
        # The source is furthest behind just before a sample of it, and furthest ahead behind it.
        up, down = share.as_integer_ratio()
        exact = np.int64 if max(up, down) * end < 1 << 62 else object
        behind = up * (begin + places.astype(exact)) - down * counts.astype(exact)
        ahead = down - up - int(behind.min())
        at_end = up * end - down * (first + places.size)
        furthest = max(furthest, Fraction(max(int(behind.max()), ahead, at_end), down))
    return furthest


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [3, 1, 4, 1, 5], [500000, 300001, 200001]])
def test_the_rows_of_a_range_are_in_its_parts(weights):
    """From the range of every source, which indices are built before a run."""
    blend = BlendedRows(list(range(len(weights))), weights)
    draw = np.random.default_rng(0)
    for _ in range(200):
        begin = int(draw.integers(10**6))
        end = begin + int(draw.integers(1, 50))
        components, local = blend.locate(np.arange(begin, end))
        for number, first, last in blend.parts(begin, end):
            found = local[components == number]
            assert first >= 0
            assert found.size == 0 or first <= found[0] <= found[-1] < last
            # No more than needed: an index of an epoch takes minutes.
            assert last - first <= found.size + 4


def weights_of_long_period(seed):
    draw = np.random.default_rng(seed)
    number = int(draw.integers(2, 9))
    if seed % 3 == 0:
        return draw.integers(10**5, 10**9 // number, number).tolist()
    if seed % 3 == 1:
        return draw.dirichlet(np.full(number, 0.4)).clip(2e-4).tolist()
    return [float(number), *[1.0 + 1.001e-3 * k + 1e-9 for k in range(number - 1)]]


@pytest.mark.parametrize("seed", range(12))
def test_shares_are_kept_far_out_without_a_short_period(seed):
    weights = weights_of_long_period(seed)
    blend = blend_of(weights)
    assert blend.period > LONGEST_PERIOD
    draw = np.random.default_rng(seed)
    # The first block, and one around each of 1e8, 1e9 and 1e10 with its edges.
    for low in (0, 10**8, 10**9, 10**10):
        begin = low + int(draw.integers(low + 1))
        assert furthest_from_share(blend, weights, begin, begin + (1 << 14) + 100) < 1


@pytest.mark.slow
@pytest.mark.parametrize("weights", [[594141, 329844, 124625], [0.18, 0.1234567, 0.6965433]])
def test_shares_are_kept_over_a_whole_period(weights):
    blend = blend_of(weights)
    whole = min(blend.period, LONGEST_PERIOD + 100)
    assert blend.period > LONGEST_PERIOD
    assert furthest_from_share(blend, weights, 0, whole) < 1
    if whole == blend.period:
        counts = np.bincount(blend.locate(np.arange(whole))[0])
        assert counts.tolist() == weights


@pytest.mark.slow
def test_many_sources_and_rare_ones_keep_their_shares():
    """Blocks as long as the rarest source needs, and edges that a plain rounding would miss."""
    draw = np.random.default_rng(1)
    weights = [*(10.0 ** draw.uniform(-4.5, 0, 20)), *[0.5 + 1e-9] * 2, *[0.001 + 1e-10] * 8]
    blend = blend_of(weights)
    length = 3 * max(1 << 14, int(sum(weights) / min(weights)))
    for begin in (0, 10**9):
        assert furthest_from_share(blend, weights, begin, begin + length) < 1


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_kept_at_the_edges_of_the_shortest_blocks(seed, monkeypatch):
    """Many edges: where a block begins and ends must leave a way between, and to the next."""
    monkeypatch.setattr(blend_module, "_LEAST_BLOCK", 1)
    draw = np.random.default_rng(seed)
    number = int(draw.integers(2, 12))
    weights = (draw.dirichlet(np.full(number, [0.3, 1, 20][seed % 3])) + 0.01).tolist()
    blend = blend_of(weights)
    assert blend._block <= 200
    assert furthest_from_share(blend, weights, 0, 5000) < 1
    assert furthest_from_share(blend, weights, 10**9, 10**9 + 5000) < 1


def test_far_samples_depend_on_nothing_looked_up_before():
    weights = [1112141, 616844, 231825]
    blend, samples = blend_of(weights), np.arange(10**9, 10**9 + 50_000)
    whole = blend.locate(samples)
    order = np.random.default_rng(0).permutation(samples.size)
    mixed = blend_of(weights).locate(samples[order])
    for found, expected in zip(mixed, whole, strict=True):
        np.testing.assert_array_equal(found, expected[order])
    np.testing.assert_array_equal(blend.locate(samples[:5])[1], whole[1][:5])
    assert len(blend._table_of.kept) <= 2


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1e7, 1.0]])
def test_blend_refuses_weights(weights):
    with pytest.raises(ConfigError, match="data.train: weights"):
        blend_of(weights)
