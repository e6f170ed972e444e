"""Links of the pages, for the site.

On GitHub they are relative. On the site, links to files outside of ``docs/`` lead to the
repository, pictures are copied, and a link that shows a page's file name shows its title. The page
of the commands gets the help of each.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from megatron_deberta.cli.main import GROUPS, command_parsers, import_command

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page.

    Args:
        markdown: text of the page.
        page: its place in the site.
        config: the site's settings.
        files: files of the site; pictures are added.

    Returns:
        The text with links that the site resolves.

    Raises:
        FileNotFoundError: a link leads to nothing.
    """

    def replace(found: re.Match[str]) -> str:
        picture, text, target, anchor = found.groups(default="")
        path = normpath(join("docs", dirname(page.file.src_uri), target))
        if path.startswith("docs/"):
            linked = files.get_file_from_path(path.removeprefix("docs/"))
            if not text.endswith(".md") or linked is None or linked.page is None:
                return found[0]
            return f"[{linked.page.title}]({target}{anchor})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri} links to {path}, which is not there")
        if not picture:
            return f"[{text}]({config.repo_url}/blob/main/{path}{anchor})"
        copy = f"pictures/{path.replace('/', '-')}"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
        depth = page.file.src_uri.count("/")
        return f"![{text}]({'../' * depth}{copy})"

    if page.file.src_uri == "commands.md":
        markdown += command_help()
    return LINK.sub(replace, markdown)


def command_help() -> str:
    """Return the help of every command as Markdown."""
    parts = []
    for group in GROUPS:
        parts.append(f"## {group.title[0].upper()}{group.title[1:]}")
        for command in group.commands:
            for name, parser in command_parsers(command, import_command(command)).items():
                title = f"{command.name} {name}".strip()
                parts.append(f"### {title}\n\n```text\n{parser.format_help()}```")
    return "\n" + "\n\n".join(parts) + "\n"
