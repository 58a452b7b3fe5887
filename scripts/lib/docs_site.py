"""What mkdocs is told besides its configuration: a page that lies outside docs/, and the links to it.

Invariants:
- A page reads the same in the repository and on the site: no file of docs/ is changed.
- A link that leads out of docs/ to anything else is left as it is, so that the strict build refuses it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_CHECKOUT = Path(__file__).resolve().parents[2]
_OUTSIDE = {"presets.md": "configs/README.md"}
"""Pages of the site that lie elsewhere in the checkout."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside."""
    for page, path in _OUTSIDE.items():
        files.append(File.generated(config, page, content=(_CHECKOUT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 -- mkdocs' names
    """Let links to what lies outside lead to its page."""
    for name, path in _OUTSIDE.items():
        markdown = re.sub(rf"\]\(\.\./{re.escape(path)}(?=[)#])", f"]({name}", markdown)
    return markdown
