"""What mkdocs is told besides its configuration: files of configs/ that the pages link to are part of the site.

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
_LINK = re.compile(r"\]\(\.\./(configs/[\w./-]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is linked to, under the path that it has in the checkout."""
    linked = {path for page in files.documentation_pages() for path in _LINK.findall(page.content_string)}
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(_CHECKOUT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 -- mkdocs' names
    """Let the links lead there."""
    return _LINK.sub(r"](\1", markdown)
