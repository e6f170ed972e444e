"""Random damage to labelled files never ends in a traceback."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from megatron_deberta.errors import DataError
from megatron_deberta.tasks import load_task, read_examples
from tests.support.task_files import PUBLISHED

COPA_XML = (
    '<copa-corpus><item id="1" asks-for="cause" most-plausible-alternative="1"><p>It rained.</p>'
    "<a1>Clouds.</a1><a2>Sun.</a2></item></copa-corpus>"
)
QUAIL_XML = (
    '<data><text id="f1"><text_body>It rained.</text_body><questions><q id="0">What?'
    '<a id="0" correct="True">rain</a><a id="1" correct="False">sun</a></q></questions>'
    "</text></data>"
)
FILES = {
    **PUBLISHED,
    "balanced_copa/balanced_copa.xml": COPA_XML,
    "quail/quail_dev.xml": QUAIL_XML,
}
MUTATIONS = int(os.environ.get("MEGATRON_DEBERTA_MUTATIONS", "40"))
VALUES = (
    "null", "[]", "{}", "-1", "1e999", "NaN", "true", '""', "9" * 5000, '"\\ud800"', "[" * 2000,
    "\x00", "\ufeff", "\t", "\n\n", "\r", '"', "<", "&", "<!DOCTYPE x>", "\U0010ffff", "\x85",
)  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 0, 1, 2, 8, 40]))
        kind = rng.randrange(4)
        if kind == 0:
            middle = rng.choice(VALUES).encode()
        elif kind == 1:
            middle = rng.randbytes(rng.randint(1, 4))
        elif kind == 2:
            at = rng.randrange(len(content) + 1)
            middle = content[at : at + rng.randint(1, 60)]
        else:
            middle = b""
        content = content[:start] + middle + content[end:]
    return content


@pytest.mark.parametrize("name", FILES)
def test_random_damage(name: str, tmp_path: Path) -> None:
    task_name, file = name.split("/", 1)
    task = load_task(task_name)
    split = next(s for s, value in task.splits.items() if file.startswith(value.files[0]))
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(name)
    messages = []
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(FILES[name].encode(), rng))
        try:
            read_examples(task, tmp_path, split)
        except DataError as error:
            messages.append(str(error))
    assert messages
    assert [text for text in messages if "\n" in text or not text.startswith(str(tmp_path))] == []
