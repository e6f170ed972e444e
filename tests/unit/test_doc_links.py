"""Relative links of README.md and docs/ point to existing files and headings."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from megatron_deberta.cli.config import list_keys

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```", re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), f"{link}: no such heading"


def test_messages_of_the_troubleshooting_page_are_those_of_the_package() -> None:
    texts = "\n".join(
        node.value
        for path in (ROOT / "megatron_deberta").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    # Messages of other programs, which this cannot check.
    others = ("torch.", "Watchdog", "NCCL", "unhandled", "No space", "SHA-256")
    messages = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    ours = [message for message in messages if not message.startswith(others)]
    assert len(ours) > 12
    for message in ours:
        for fragment in message.split("..."):
            assert fragment.strip() in texts, f"no message has {fragment!r}"


@functools.cache
def key_names() -> set[str]:
    return {key.name for key in list_keys()}


@pytest.mark.parametrize(
    "page",
    # It names keys that are gone.
    [page for page in PAGES if page.name != "renamings.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_configuration_keys_exist(page: Path) -> None:
    keys = key_names()
    sections = "|".join({name.partition(".")[0] for name in keys})
    named = re.compile(rf"(?<![\w/.])((?:{sections})\.[a-z_]+)\b(?!\.?\()")
    for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        for name in named.findall(code):
            module = ROOT / "megatron_deberta" / name.replace(".", "/")
            is_file = name.endswith((".py", ".yaml", ".json", ".onnx"))
            is_module = module.is_dir() or module.with_suffix(".py").exists()
            assert name in keys or is_file or is_module, f"no key {name}"
