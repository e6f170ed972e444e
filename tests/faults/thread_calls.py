"""Call transformers' models with ``use_fast_attention`` in eight threads, with mixed options.

A call has its own rows, padding, options (hidden states, attention maps, tuples or outputs, with or
without mask, with or without gradients of the embeddings), and models differ in kind and head and
in whether padding is removed. Every result must equal, bit by bit, that of the same call alone; and
those, to 1e-5, the stock model's. A case is a thousand calls and appends one JSON line to the
output; cases with a line about the present code are skipped.

  python -m tests.faults.thread_calls
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.tables.faults import THREAD_CALLS_CODE
from megatron_deberta.hf import use_fast_attention
from tests.faults.campaign import run_numbered
from tests.support.stock_models import assert_same, build, inputs, labelled

CASES, CALLS, THREADS = 10, 1000, 8
MODELS = (
    ("v1", "ForTokenClassification", True), ("v2", "Model", True), ("v2", "ForMaskedLM", False),
    ("v3", "ForSequenceClassification", True), ("v3_p2c", "ForQuestionAnswering", True),
)  # fmt: skip
"""Kind, head, and whether padding is removed."""
KINDS_OF_CALLS = 60
"""Different calls of a case; each is repeated, in an order of its own."""


class Call(NamedTuple):
    """One call.

    Attributes:
        model: number in ``MODELS``.
        batch: arguments of the model.
        options: further arguments.
        with_gradient: whether the gradient of the embeddings' output is computed.
    """

    model: int
    batch: dict[str, Tensor]
    options: dict[str, bool]
    with_gradient: bool


def draw(generator: random.Random) -> Call:
    """Draw a call."""
    model = generator.randrange(len(MODELS))
    rows, length = generator.randint(1, 4), generator.choice((1, 3, 8, 21))
    side = generator.choice(("left", "right"))
    batch = inputs(rows, length, side, generator.randrange(1 << 30))
    options = {
        name: generator.random() < 0.5
        for name in ("output_hidden_states", "output_attentions", "return_dict")
        if generator.random() < 0.5
    }
    if generator.random() < 0.2:
        batch = {"input_ids": batch["input_ids"]}
    elif generator.random() < 0.5:
        batch = labelled(MODELS[model][1], batch)
    return Call(model, batch, options, generator.random() < 0.3)


def run(model: Any, call: Call) -> dict[str, Tensor]:
    """Return the tensors of a call by name, and the gradient of the embeddings' output."""
    with torch.set_grad_enabled(call.with_gradient):
        arguments = dict(call.batch)
        embedded = None
        if call.with_gradient:
            ids = arguments.pop("input_ids")
            embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
            arguments["inputs_embeds"] = embedded
        out = model(**arguments, **call.options)
        found = dict(flattened(out.items() if isinstance(out, Mapping) else enumerate(out)))
        if embedded is not None:
            # Not the sum of squares, which LayerNorm fixes.
            total = sum(
                (value.flatten() * torch.linspace(-1, 1, value.numel())).sum()
                for value in found.values()
            )
            # Of this call alone, unlike parameters' gradients, which threads would share.
            (found["gradient"],) = torch.autograd.grad(total, [embedded])
    return {name: value.detach() for name, value in found.items()}


def flattened(values: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among named values and in tuples, by name."""
    for name, value in values:
        if torch.is_tensor(value):
            yield str(name), value
        elif value is not None:
            yield from ((f"{name}.{number}", each) for number, each in enumerate(value))


@contextmanager
def switching_often() -> Iterator[None]:
    """Let Python switch between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_case(case: int, calls: int = CALLS) -> dict[str, Any]:
    """Make the calls of a case in threads and compare them with calls alone."""
    begin = time.monotonic()
    generator = random.Random(f"thread calls {case}")
    kinds = [draw(generator) for _ in range(KINDS_OF_CALLS)]
    models = [build(kind, head).eval() for kind, head, _ in MODELS]
    stock = [run(models[call.model], call) for call in kinds]
    for model, (_, _, remove_padding) in zip(models, MODELS, strict=True):
        use_fast_attention(model, remove_padding=remove_padding)
    alone = [run(models[call.model], call) for call in kinds]
    for ours, theirs in zip(alone, stock, strict=True):
        assert_same(ours, theirs)
    order = [generator.randrange(KINDS_OF_CALLS) for _ in range(calls)]

    def differs(number: int) -> str:
        found = run(models[kinds[number].model], kinds[number])
        if found.keys() != alone[number].keys():
            return f"call {number}: {sorted(found)}, alone {sorted(alone[number])}"
        names = [name for name, value in found.items() if not value.equal(alone[number][name])]
        return f"call {number}: {names}" if names else ""

    with switching_often(), ThreadPoolExecutor(THREADS) as threads:
        different = [text for text in threads.map(differs, order) if text]
    seconds = round(time.monotonic() - begin, 1)
    return {"calls": calls, "different": different[:20], "seconds": seconds, "ok": not different}


def main() -> int:
    """Run the missing cases; return 1 if one failed."""
    assert __doc__
    torch.set_num_threads(1)
    return run_numbered(
        __doc__, "thread_calls", CASES, THREAD_CALLS_CODE, lambda: nullcontext(run_case)
    )


if __name__ == "__main__":
    sys.exit(main())
