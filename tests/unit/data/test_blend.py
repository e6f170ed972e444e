"""Blends: every source within one sample of its share, at every prefix and any index."""

import numpy as np
import pytest

from megatron_deberta.data.blend import LONGEST_PERIOD, BlendedRows
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


def test_largest_deficit_would_not_do():
    """Why the rule is not Megatron's: ``helpers.build_blending_indices`` strays further."""
    weights = np.array([0.43, 0.42, *[0.15 / 8] * 8])
    counts, worst = np.zeros(10), 0.0
    for number in range(1, 5000):
        counts[np.argmax(weights * number - counts)] += 1
        worst = max(worst, np.abs(counts - weights * number).max())
    assert worst > 1.0
    assert largest_distance(weights.tolist(), 5000) < 1.0


def test_decimals_repeat_exactly_and_far_indices_are_found_at_once():
    blend = blend_of([0.5, 0.3, 0.15, 0.05])
    assert blend.period == 20
    far = 10**12 + 7
    components, local = blend.locate(np.array([far]))
    near, _ = blend.locate(np.array([far % 20]))
    assert components == near
    share = [0.5, 0.3, 0.15, 0.05][int(components[0])]
    assert abs(local[0] + 1 - share * (far + 1)) < 1.0


def test_weights_without_a_short_period_are_rounded():
    weights = [2**0.5, 3**0.5, 1.0]
    blend = blend_of(weights)
    assert blend.period == LONGEST_PERIOD
    assert largest_distance(weights, 100_000) < 1.0
    counts = np.bincount(blend.locate(np.arange(LONGEST_PERIOD))[0])
    shares = np.array(weights) / np.sum(weights)
    assert np.abs(counts - shares * LONGEST_PERIOD).max() < 1.0


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1e7, 1.0]])
def test_blend_refuses_weights(weights):
    with pytest.raises(ConfigError, match="data.train: weights"):
        blend_of(weights)
