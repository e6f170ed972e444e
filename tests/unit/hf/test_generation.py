"""Generation: greedy and sampled continuations, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.hf.generation import Sampling, TextGenerator, choose
from megatron_deberta.hf.loading import build_model
from megatron_deberta.model import DebertaForPretraining
from megatron_deberta.model.incremental import IncrementalDecoder
from megatron_deberta.model.inputs import ModelInputs
from tests.support.tiny_models import TEXT, V2, random_weights, reader, tiny_tokenizer
from tests.support.tolerances import FP32_MODEL

PROMPT = TEXT[0][:20]
CONFIG = replace(V2, conv_kernel_size=3)
MODEL = build_model(CONFIG, reader(random_weights(CONFIG)))


def next_logits(ids: Tensor, model: DebertaForPretraining = MODEL) -> Tensor:
    last = torch.tensor([[ids.size(1) - 1]])
    return model.masked_logits(ModelInputs(ids, causal=True), last)[0, 0]


def generator(
    max_tokens: int = 96, logits: Callable[[Tensor], Tensor] = next_logits
) -> TextGenerator:
    return TextGenerator(logits, tiny_tokenizer(), max_tokens)


def prompt_ids() -> list[int]:
    return [tiny_tokenizer().cls_id, *tiny_tokenizer().encode(PROMPT)]


def test_greedy_tokens_are_those_of_one_pass_over_the_whole_row() -> None:
    """Later tokens change no logit, so a pass over the result predicts each token of it."""
    tokenizer, ids = tiny_tokenizer(), prompt_ids()
    whole = generator().continue_ids(ids, 12)
    assert whole[: len(ids)] == ids
    assert len(whole) == len(ids) + 12
    excluded = [token for token in tokenizer.special_ids if token != tokenizer.sep_id]
    with torch.no_grad():
        logits = MODEL.masked_logits(ModelInputs(torch.tensor([whole]), causal=True))[
            0, :, : tokenizer.num_tokens
        ]
    logits[:, excluded] = -math.inf
    assert logits.argmax(-1)[len(ids) - 1 : -1].tolist() == whole[len(ids) :]


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(V2, absolute_positions="input", mask_decoder_passes=0, conv_kernel_size=5),
        replace(V2, key_bias=False, position_key_bias=False, position_buckets=0),
        replace(V2, position_terms="none"),
    ],
)
def test_cached_keys_and_values_change_no_greedy_token(config: ModelConfig) -> None:
    model = build_model(config, reader(random_weights(config)))
    decoder, lengths = IncrementalDecoder(model), list[int]()

    def cached(ids: Tensor) -> Tensor:
        logits = decoder(ids)
        torch.testing.assert_close(logits, next_logits(ids, model), **FP32_MODEL)
        return logits

    for prompt in (prompt_ids(), prompt_ids()[:5], [*prompt_ids()[:4], 9, 8]):
        whole = generator(logits=partial(next_logits, model=model)).continue_ids(prompt, 12)
        assert generator(logits=cached).continue_ids(prompt, 12) == whole
    # The prompt of a text, then one token after the other.
    model.embeddings.register_forward_hook(lambda _, i, __: lengths.append(i[0].size(1)))
    generator(logits=decoder).continue_ids(prompt_ids(), 4)
    assert lengths[1:] == [1] * (len(lengths) - 1)


def test_sampling_is_a_function_of_the_seed() -> None:
    first, again, other = (
        generator().continue_ids(prompt_ids(), 12, Sampling(temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    greedy = generator().continue_ids(prompt_ids(), 12)
    assert generator().continue_ids(prompt_ids(), 12, Sampling(1.0, top_k=1)) == greedy
    assert generator().continue_ids(prompt_ids(), 12, Sampling(1.0, top_p=0.0)) == greedy
    assert generator().continue_ids(prompt_ids(), 12, Sampling(1e-300)) == greedy
    assert not set(first[1:]) & set(tiny_tokenizer().special_ids)


def test_a_text_ends_at_sep_and_at_the_last_position() -> None:
    tokenizer = tiny_tokenizer()

    def ends(ids: Tensor) -> Tensor:
        logits = torch.zeros(V2.vocab_size)
        logits[tokenizer.sep_id] = 1.0 if ids.size(1) > 30 else -1.0
        logits[-1] = 9.0  # beyond the tokenizer's vocabulary
        logits[tokenizer.mask_id] = 9.0
        return logits

    assert len(generator(logits=ends).continue_ids(prompt_ids(), 80)) == 31
    assert len(generator(20).continue_ids(prompt_ids(), 80)) == 20
    assert generator().generate(PROMPT, 5).startswith(PROMPT.strip())
    with pytest.raises(ConfigError, match="has 8 positions"):
        generator(8).generate(PROMPT, 5)


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.1, 0.6, 0.3, 0.0], dtype=torch.float64)
    random = torch.Generator().manual_seed(0)

    def shares(sampling: Sampling) -> list[float]:
        drawn = [choose(probabilities.log(), sampling, random) for _ in range(4000)]
        return [drawn.count(token) / 4000 for token in range(4)]

    assert shares(Sampling(1.0)) == pytest.approx([0.1, 0.6, 0.3, 0.0], abs=0.03)
    squares = [0.01 / 0.46, 0.36 / 0.46, 0.09 / 0.46, 0.0]
    assert shares(Sampling(0.5)) == pytest.approx(squares, abs=0.03)
    two = [0.0, 2 / 3, 1 / 3, 0.0]
    assert shares(Sampling(1.0, top_k=2)) == pytest.approx(two, abs=0.03)
    assert shares(Sampling(1.0, top_p=0.7)) == pytest.approx(two, abs=0.03)
