"""Hooks of the site: its first page is README; files outside docs/ are named, not linked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

README = Path(__file__).parents[1] / "README.md"
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./(?:examples|CON)|examples|CON|CHANGELOG)[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    """Add README as the first page, its links relative to docs/."""
    text = README.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside docs/ without a link."""
    return OUTSIDE.sub(r"\1", markdown)
