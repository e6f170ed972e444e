"""Scripts under tools/ that the quickstart uses."""

import importlib.util
import json
import math
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    """Import a script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gather_machine_text.py", "fill_held_out.py"])
def test_tools_are_executable(name: str) -> None:
    assert os.access(ROOT / "tools" / name, os.X_OK)


gather = load_tool("gather_machine_text")
held_out = load_tool("fill_held_out")


@pytest.mark.parametrize(
    "paragraph",
    [
        "Return the value of ``name`` as it was when\n    the object was created by the caller.",
        "The order of the items is not defined, but it is the same in every run.",
    ],
)
def test_sentences_are_prose(paragraph: str) -> None:
    text = gather.clean_prose(paragraph)
    assert text is not None
    assert "\n" not in text
    assert "`" not in text
    assert text.endswith(".")


@pytest.mark.parametrize(
    "paragraph",
    [
        ">>> print(value) shows the value of the thing that was made before it.",
        "name (`str`, *optional*): The name of the thing that is to be made by this.",
        "def function(argument): return the value of the argument as it was given.",
        '{"key": "value", "other": "a value that is as long as a sentence of prose"}.',
        "See https://example.org for the description of what this value means here.",
        "Too few words.",
        "No full stop at the end of a sentence that is otherwise an ordinary one",
        "TORCH CUDA ARCH LIST Must Be Set Before The Build Of This Very Long Name.",
    ],
)
def test_code_and_signatures_are_not_prose(paragraph: str) -> None:
    assert gather.clean_prose(paragraph) is None


def test_documents_share_no_long_run_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["alpha", "beta", "gamma", "delta"]
    passage = " ".join(f"{words[i % 4]}{'x' * (i // 4)}" for i in range(40))
    other = "Another paragraph that is new and has nothing in common with the first one."
    monkeypatch.setattr(
        gather, "sources", lambda: [[f"First {passage}."], [f"Then {passage}.", other], [other]]
    )
    assert list(gather.documents()) == [f"First {passage}.", other]


def test_module_texts_are_docstrings_and_comments() -> None:
    source = '"""The docstring."""\nx = 1  # not this\n# One comment,\n# two lines.\n\n# Another.\n'
    assert list(gather.module_texts(source)) == [
        "The docstring.",
        "One comment,\ntwo lines.\n",
        "Another.\n",
    ]


def test_header_texts_are_comments() -> None:
    source = (
        "/**\n * First line,\n * second line.\n */\nint x; /* aside */\n  /// One,\n  // two.\n"
    )
    found = [" ".join(text.split()) for text in gather.header_texts(source)]
    assert found == ["First line, second line.", "aside", "One, two."]


def test_sentences_are_taken_from_documents(tmp_path: Path) -> None:
    file = tmp_path / "part-0.jsonl"
    sentence = "The second sentence is long enough to be taken by the tool."
    file.write_text(json.dumps({"text": f"Short one. {sentence}\n{sentence}"}) + "\n")
    assert held_out.sentences([file]) == [sentence]


def test_prior_floor_raises_the_penalty_of_rare_tokens_only() -> None:
    penalty = 0.5 * torch.tensor([0.1, 0.02, 0.0001]).log()
    penalty = torch.cat([penalty, torch.tensor([math.inf])])  # a special token
    expected = 0.5 * torch.tensor([0.1, 0.02, 0.005]).log()
    assert held_out.with_floor(penalty, 0.5, 0.0) is penalty
    raised = held_out.with_floor(penalty, 0.5, 0.005)
    torch.testing.assert_close(raised[:3], expected)
    assert raised[3] == math.inf


def test_a_frequent_word_is_masked_and_answers_are_words() -> None:
    class Filler:
        mask_token = "[MASK]"

        def fill(self, text: str, top_k: int, penalty: object) -> list[list[object]]:
            self.text, self.penalty = text, penalty
            return [[type("P", (), {"text": f" word{k}"}) for k in range(top_k)]]

    filler = Filler()
    sentence = "The second sentence is long."
    place = held_out.choose_word(sentence, {"second", "unused"}, "7")
    assert place is not None
    penalty = object()
    answer = held_out.answer(filler, {"word3", "word50", "word500"}, place, penalty)
    assert filler.penalty is penalty
    assert answer == held_out.Answer("The [MASK] sentence is long.", "second", ["word3", "word50"])
    assert filler.text == answer.sentence
    assert held_out.choose_word(sentence, {"first"}, "7") is None


def test_frequent_words_are_whole_lower_case_pieces_in_order() -> None:
    class Pieces:
        num_tokens = 5

        def piece(self, token: int) -> str:
            return ["[CLS]", "\u2581the", "s", "\u2581The", "\u2581of"][token]

    assert held_out.frequent_words(Pieces(), 9) == ["the", "of"]
    assert held_out.frequent_words(Pieces(), 1) == ["the"]
