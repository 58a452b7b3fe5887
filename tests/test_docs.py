"""The documentation: what is generated is fresh, what is shown is there, and the site builds without a warning and without a network."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib import settings_page
from vllm_lazy_grammar.adapter.request import OPTIONS
from vllm_lazy_grammar.core.request_args import LazyGrammar
from vllm_lazy_grammar.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))


def test_the_settings_page_is_what_the_code_says():
    assert settings_page.PAGE.read_text("utf-8") == settings_page.page(), "run scripts/docs"


def test_the_settings_page_has_a_line_for_all_that_can_be_set():
    page = settings_page.page()
    for name in (*Settings.__slots__, *OPTIONS, *LazyGrammar.__slots__[:6]):
        assert page.count(f"\n| `{name}` |") == 1, name


def test_where_a_setting_sends_its_reader_it_is_written_about():
    for page, names in settings_page._MORE.items():
        text = (DOCS / page).read_text("utf-8")
        assert [name for name in names if name not in text] == [], page


def test_every_example_is_shown_from_its_file():
    pages = "".join(path.read_text("utf-8") for path in DOCS.glob("*.md"))
    assert EXAMPLES
    for path in EXAMPLES:
        assert f'--8<-- "examples/{path.name}"' in pages


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_run_by_a_test_on_a_server(path):
    assert re.search(rf'"{path.stem}(\.py)?"', (ROOT / "tests/serving/test_clients.py").read_text("utf-8"))
    assert "main" in {
        each.name for each in ast.parse(path.read_text("utf-8")).body if isinstance(each, ast.FunctionDef)
    }


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_top_level_pages_lead_to_files_and_headings(name):
    for target, anchor in re.findall(r"\]\(([\w./-]+)(?:#([\w-]+))?\)", (ROOT / name).read_text("utf-8")):
        assert (ROOT / target).exists(), target
        assert not anchor or anchor in _anchors((ROOT / target).read_text("utf-8")), (target, anchor)


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        "scripts/lib/mkdocs.yml",
        "--site-dir",
        str(folder),
    ]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # what the theme says of its own future
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_fetches_nothing_from_elsewhere(site):
    pages = {path.stem for path in site.glob("*.html")}
    assert pages >= {path.stem for path in DOCS.glob("*.md")}
    for path in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)", path.read_text("utf-8")
        )
        assert fetched == [], path.name


@pytest.mark.slow
def test_the_site_shows_the_examples_and_what_the_pages_link_to_outside_docs(site):
    clients = (site / "clients.html").read_text("utf-8")
    assert "Runner" in clients
    assert "--8&lt;--" not in clients
    assert "name_pattern" in (site / "configs/index.html").read_text("utf-8")
