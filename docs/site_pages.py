"""The pages of the site that are not files of `docs`: those of the repository's root, and the reference of commands.

`mkdocs build` calls `on_files` and `on_page_markdown`. A link works on the site as it does in the repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Pages of the site: the files of the repository that they show.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)")
_WIDTH = 100


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page from places in the repository to places in the site."""
    return for_site(markdown, page.file.src_uri)


def for_site(markdown: str, page: str) -> str:
    source = PAGES.get(page, f"docs/{page}")
    pages = {source: page for page, source in PAGES.items()}

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        return pages.get(target) or target.removeprefix("docs/")

    return _LINK.sub(rewritten, markdown)


def commands() -> str:
    """Return the reference of commands: what `--help` prints of each."""
    from amago_cli.app import build

    command = build()
    sections = (f"## `{name}`\n\n```text\n{text}\n```\n" for name, text in _helps(command, "amago", None))
    return "\n".join(["# Commands\n", "What `--help` prints of each command.\n", *sections])


def _helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """Yield the full name and the help of a command and of its subcommands."""
    context = command.context_class(
        command,
        info_name=name,
        parent=parent,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        **command.context_settings,
    )
    yield context.command_path, command.get_help(context).strip()
    for sub in getattr(command, "commands", {}).values():
        yield from _helps(sub, sub.name, context)
