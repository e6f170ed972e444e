"""The three forms of SplitMix64's finaliser give the same, published bits."""

import numpy as np
import torch

from megatron_deberta.hashing import GOLDEN_GAMMA, finalize, finalize_array, finalize_tensor


def test_first_output_of_splitmix64_with_seed_zero() -> None:
    assert finalize(GOLDEN_GAMMA) == 0xE220A8397B1DCDAF


def test_integers_arrays_and_tensors_agree() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 64, 1000, np.uint64)
    tensor = finalize_tensor(torch.from_numpy(words.copy().view(np.int64)))
    expected = [finalize(int(word)) for word in words]
    array = finalize_array(words)
    assert array is words
    assert array.tolist() == expected
    assert tensor.numpy().view(np.uint64).tolist() == expected
