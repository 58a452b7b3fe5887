"""The page of a trace, in headless Chromium: open it, click a token, read its details.

A Chromium is looked for under the names that it has, and where playwright keeps its own; `scripts/test` gets one where it can. ``CHROMIUM``
names another. Without one the tests are skipped, but never in CI.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from vllm_lazy_grammar.cli.page import page
from vllm_lazy_grammar.core.story import read

pytestmark = pytest.mark.slow

EVIL = '</script><script>document.title = "pwned"</script><img src=x onerror=alert(1)>&lt;'
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with contextlib.ExitStack() as stack:
        playwright = stack.enter_context(sync_playwright())
        own = playwright.chromium.executable_path
        found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), own)
        if not Path(found).exists():
            assert "CI" not in os.environ, "there is no Chromium, and scripts/test could get none"
            pytest.skip("there is no Chromium here: apt-get install chromium, or .venv/bin/playwright install chromium")
        launched = playwright.chromium.launch(executable_path=found, args=FLAGS)
        stack.callback(launched.close)
        yield launched


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of a story; whatever the page complains of, or asks the network for, fails the test."""
    complaints, pages = [], []

    def opening(story):
        path = tmp_path / "page.html"
        path.write_text(page(story), "utf-8")
        shown = browser.new_page()
        pages.append(shown)
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
        shown.goto(path.as_uri())
        return shown

    yield opening
    for shown in pages:
        shown.close()
    assert complaints == []


@pytest.fixture
def story(command, model, tmp_path):
    """A check's: a quoted marker that does not count, a firing that waits for the compile, and the grammar to its end."""
    schema = json.dumps({"type": "object", "properties": {"stars": {"type": "integer"}}, "required": ["stars"]})
    triggers = ("-t", "word:<answer>", "-t", "pattern:(?<!`)<json>", "--start", "after")
    text = 'Not `<json>`: <answer>{"stars": 3}</s>'
    saved = tmp_path / "x.jsonl"
    assert command("check", model, "--json", schema, *triggers, text, "--late", "--save", saved).exit_code == 0
    return read(saved)


def line(n, text, state="awaiting", **more):
    return {"n": n, "byte": n, "token": n, "text": text, "state": state, **more}


def with_tokens(story, *tokens, **end):
    return [story[0], *tokens, {"end": {**story[-1]["end"], **end}}]


def details(shown):
    """The panel's terms and what they say."""
    return dict(
        zip(shown.locator("#details dt").all_inner_texts(), shown.locator("#details dd").all_inner_texts(), strict=True)
    )


def test_the_answer_stands_there_with_each_token_in_the_colour_of_its_state(opened, story):
    shown = opened(story)
    assert shown.locator("#answer").text_content() == 'Not `<json>`: <answer>{"stars": 3}</s>'
    classes = [span.get_attribute("class").split()[1] for span in shown.locator("#answer .t").all()]
    assert classes == [each["state"].replace(" ", "-") for each in story[1:-1]]
    colours = {
        name: shown.locator(f"#answer .{name}").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for name in set(classes)
    }
    assert len(set(colours.values())) == len(colours) == 5


def test_a_click_on_a_token_shows_its_details(opened, story):
    shown = opened(story)
    fired = next(each for each in story[1:-1] if "events" in each)
    shown.locator("#answer .t.event").click()
    assert shown.locator("#details h2").first.text_content() == f"Token {fired['n']}"
    told = details(shown)
    assert told["id"] == str(fired["token"])
    assert told["state behind it"] == "pending"
    assert told["mask left"] == "all 320"
    assert (
        "word:<answer> fires: the grammar begins at byte 22, nothing to replay."
        in shown.locator("#details").inner_text()
    )


def test_the_token_behind_the_wait_tells_it_and_is_marked_in_the_charts(opened, story):
    shown = opened(story)
    waited = next(each for each in story[1:-1] if each.get("waited_ms"))
    shown.locator("#answer .t").nth(waited["n"]).click()
    assert details(shown)["waited for the compile"] == f"{waited['waited_ms']} ms"
    assert details(shown)["mask left"] == f"{waited['left']} of 320"
    for chart in ("#left", "#fill"):
        assert shown.locator(f"{chart} rect").count() == len(story) - 2
        assert shown.locator(f"{chart} rect[fill='var(--mark)']").count() == 1
    shown.locator("#left rect").nth(2).click()
    assert shown.locator("#details h2").first.text_content() == "Token 2"


def test_the_arrow_keys_go_from_token_to_token(opened, story):
    shown = opened(story)
    for _ in range(3):
        shown.keyboard.press("ArrowRight")
    shown.keyboard.press("ArrowLeft")
    assert shown.locator("#details h2").first.text_content() == "Token 1"
    assert shown.locator("[aria-pressed='true']").count() == 1


def test_a_near_miss_leads_to_its_place(opened, story):
    shown = opened(story)
    assert "where the pattern does not count it" in shown.locator("#misses").inner_text()
    shown.locator("#misses button").click()
    assert details(shown)["byte"] == "5"


def test_drafts_a_refused_token_and_what_was_not_recorded_are_shown(opened, story):
    tokens = [line(0, "a", draft="grammar"), line(1, "b", instead_of=7)]
    drafts = {"offered": 2, "accepted": 1, "of_the_grammar": {"offered": 2, "accepted": 1}}
    shown = opened(with_tokens(story, *tokens, drafts=drafts, left_out=5, refused={"token": 9, "text": "!"}))
    assert "drafts: 2 offered, 1 accepted" in shown.locator("#summary").inner_text()
    assert 'refused: token 9 "!"' in shown.locator("#answer").inner_text()
    assert "5 more tokens were not recorded" in shown.locator("#answer").inner_text()
    shown.locator("#answer .t").first.click()
    assert details(shown)["drafted by"] == "the grammar, and accepted"
    shown.locator("#answer .t").nth(1).click()
    assert details(shown)["instead of the draft"] == "7"


def test_an_answer_is_shown_as_text_whatever_it_holds(opened, story):
    missed = [{"trigger": EVIL, "text": EVIL, "byte": 0, "why": EVIL}]
    shown = opened(with_tokens(story, line(0, EVIL), misses=missed))
    assert shown.locator("#answer").text_content() == EVIL
    assert shown.title() == "Trace of a lazy grammar"
    assert shown.locator("img").count() == 0


def test_the_command_writes_the_page_into_one_file(command, opened, story, tmp_path):
    saved = tmp_path / "x.jsonl"
    assert command("trace", saved, "--html", tmp_path / "out.html").exit_code == 0
    text = (tmp_path / "out.html").read_text("utf-8")
    assert text == page(story)
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert command("trace", saved, "--html", tmp_path / "no" / "out.html").exit_code == 2
