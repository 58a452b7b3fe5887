"""The command's words and options; what they do stands in the modules beside.

Exit status: 0 accepted, 1 refused, 2 wrong input.

Invariants:
- What can not be served is one line that names the option and the value, and status 2; no traceback.
- Whatever takes seconds to import is imported by the command that needs it.
"""
# ruff: noqa: PLC0415 -- the second invariant

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path  # noqa: TC003 -- typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import vllm_lazy_grammar
from vllm_lazy_grammar.cli import show
from vllm_lazy_grammar.core import story as stories
from vllm_lazy_grammar.errors import RequestError, SettingsError
from vllm_lazy_grammar.settings import Settings
from vllm_lazy_grammar.tools.presets import catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_lazy_grammar.cli.workbench import Model

ACCEPTED, REFUSED, WRONG = 0, 1, 2

app = typer.Typer(
    name="vllm-lazy-grammar", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Why a grammar did or did not fire, what a preset takes, and whether vLLM fits.",
)  # fmt: skip
presets_app = typer.Typer(invoke_without_command=True, help="The families of tool-call formats.")
app.add_typer(presets_app, name="presets")


def run() -> None:
    """The command's entry point."""
    app()


@contextmanager
def _wrong_input() -> Iterator[None]:
    try:
        yield
    except (RequestError, SettingsError) as error:
        Console(stderr=True, soft_wrap=True).print(Text(str(error), style="red"))
        raise typer.Exit(WRONG) from error


def _console() -> Console:
    return Console(soft_wrap=True)


_GRAMMAR, _GATE, _ANSWER, _CALLS = "Grammar, exactly one", "Triggers and options", "Answer", "Calls of tools"


@app.command()
def check(  # noqa: PLR0913 -- each is an option
    tokenizer: Annotated[Path, typer.Argument(help="A tokenizer's folder, or a model's.")],
    text: Annotated[str | None, typer.Argument(help="The answer.")] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="A file with the answer's text.", rich_help_panel=_ANSWER)] = None,
    ids: Annotated[
        str | None, typer.Option(help="Recorded token ids, or a file of them.", rich_help_panel=_ANSWER)
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="The answer need not be complete.", rich_help_panel=_ANSWER)
    ] = False,
    json_schema: Annotated[
        str | None, typer.Option("--json", help="A JSON schema, typed or a file.", rich_help_panel=_GRAMMAR)
    ] = None,
    json_object: Annotated[
        bool, typer.Option("--json-object", help="Any JSON object.", rich_help_panel=_GRAMMAR)
    ] = False,
    regex: Annotated[str | None, typer.Option(help="A regular expression.", rich_help_panel=_GRAMMAR)] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="One of these texts; once each.", rich_help_panel=_GRAMMAR)
    ] = None,
    grammar: Annotated[
        str | None, typer.Option(help="EBNF or Lark, typed or a file.", rich_help_panel=_GRAMMAR)
    ] = None,
    structural_tag: Annotated[
        str | None, typer.Option(help="A structural tag, typed or a file.", rich_help_panel=_GRAMMAR)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A family, a tool-call parser, or a file (.toml).", rich_help_panel=_GRAMMAR)
    ] = None,
    tools: Annotated[
        str | None, typer.Option(help="With --preset: the tools, JSON or a file.", rich_help_panel=_CALLS)
    ] = None,
    tool_choice: Annotated[
        str, typer.Option(help="auto, required, none, or JSON as in a request.", rich_help_panel=_CALLS)
    ] = "auto",
    one_call: Annotated[
        bool, typer.Option("--one-call", help="parallel_tool_calls: false.", rich_help_panel=_CALLS)
    ] = False,
    trigger: Annotated[
        list[str] | None,
        typer.Option("--trigger", "-t", help="word:, token:, pattern: or pattern_full:.", rich_help_panel=_GATE),
    ] = None,
    start: Annotated[str | None, typer.Option(help="trigger or after.", rich_help_panel=_GATE)] = None,
    mandatory: Annotated[bool, typer.Option("--mandatory", rich_help_panel=_GATE)] = False,
    force_after: Annotated[int | None, typer.Option(rich_help_panel=_GATE)] = None,
    rearm: Annotated[bool, typer.Option("--rearm", rich_help_panel=_GATE)] = False,
    max_activations: Annotated[int | None, typer.Option(rich_help_panel=_GATE)] = None,
    on_reject: Annotated[str | None, typer.Option(help="forbid, disarm or error.", rich_help_panel=_GATE)] = None,
    compact: Annotated[bool, typer.Option("--compact", help="disable_any_whitespace.")] = False,
    context: Annotated[str, typer.Option(help="The end of the prompt, for patterns that see it.")] = "",
    late: Annotated[bool, typer.Option("--late", help="As if the compile took long.")] = False,
    vocab_size: Annotated[int | None, typer.Option(help="Entries of the model's output.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The verdict without the tokens.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write a trace file, as the server does.")] = None,
) -> None:
    """Show, token by token, what the gate and the grammar make of an answer. Status 0: accepted, 1: refused, 2: wrong input."""
    from vllm_lazy_grammar.cli import asked
    from vllm_lazy_grammar.cli.follow import Follower
    from vllm_lazy_grammar.cli.workbench import Model, Workbench
    from vllm_lazy_grammar.engines import policy

    xargs: dict[str, Any] = {
        "grammar_triggers": trigger,
        "grammar_start": start,
        "grammar_mandatory": mandatory,
        "grammar_force_after": force_after,
        "grammar_rearm": rearm,
        "grammar_max_activations": max_activations,
        "grammar_on_reject": on_reject,
    }
    grammars = asked.Grammars(
        json_schema, json_object, regex, tuple(choice or ()), grammar, structural_tag, preset
    )  # fmt: skip
    calls = asked.Calls(tools, tool_choice, parallel=not one_call)
    with _wrong_input():
        model = Model(tokenizer, vocab_size)
        question = asked.question(grammars, calls, xargs, model, compact=compact, context=context)
        answer = asked.read_answer(text, file, ids, model.tokens)
        policy.check(question.key, policy.Choice())
        follower = Follower(Workbench(model.vocabulary, Settings(), late=late), question, late=late)
    verdict = follower.follow(answer, partial=partial)
    if save is not None:
        with _wrong_input():
            _write("--save", save, stories.write(verdict.story))
    console = _console()
    if not quiet:
        show.tokens(console, verdict.story)
    show.misses(console, verdict.story[-1]["end"]["misses"])
    if verdict.refusal is None:
        idle = question.spec is not None and not verdict.activations
        console.print(Text("accepted" + (": no trigger fired, nothing was held" if idle else ""), style="bold green"))
        return
    show.refusal(console, verdict.refusal, model.vocabulary)
    raise typer.Exit(REFUSED)


@presets_app.callback()
def presets(context: typer.Context) -> None:
    """List the families, and the vLLM tool-call parsers that they serve."""
    if context.invoked_subcommand is not None:
        return
    found = catalogue()
    table = Table("family", "serves --tool-call-parser", "opens a call", box=None, pad_edge=False)
    for name, preset in found.families.items():
        opens = ", ".join(preset.trigger.openers or preset.trigger.patterns)
        table.add_row(name, ", ".join(preset.parsers) or "(none: for triggers)", Text(opens))
    console = _console()
    console.print(table)
    for parser, why in found.unserved.items():
        console.print(Text(f"not served: {parser}: {why}"))


@presets_app.command("test")
def presets_test(
    file: Annotated[Path, typer.Argument(help="Your preset, a TOML file.")],
    samples: Annotated[
        Path | None, typer.Option(help="Sample outputs, JSON lines; default: the preset's name with .jsonl.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="The model's folder; without it each byte is a token.")] = None,
) -> None:
    """Hold a preset of yours against sample outputs. Status 0: all as they must be, 1: some are not, 2: wrong input."""
    from vllm_lazy_grammar.cli.asked import preset_in
    from vllm_lazy_grammar.cli.presets import Trial, read_samples
    from vllm_lazy_grammar.cli.workbench import Model

    console, faults = _console(), 0
    with _wrong_input():
        model: Model | None = None if tokenizer is None else Model(tokenizer)
        trial, given = Trial(preset_in(file), model), read_samples(samples or file.with_suffix(".jsonl"))
        for number, sample in enumerate(given, 1):
            result = trial.judge(sample)
            faults += bool(result.fault)
            verdict = Text(result.fault or "as it must be", style="red" if result.fault else "green")
            console.print(Text(f"{number}: {sample.text[:60]!r}: began {result.calls} times: ") + verdict)
    console.print(Text(f"{len(given) - faults} of {len(given)} samples are as they must be"))
    if faults:
        raise typer.Exit(REFUSED)


@app.command()
def doctor(
    additional_config: Annotated[str, typer.Option(help="As given to vllm serve: JSON.")] = "{}",
) -> None:
    """Say what is installed and whether it fits: vLLM, each seam, engines, settings. Status 0: all fits, 1: not, 2: wrong input."""
    from vllm_lazy_grammar.cli import doctor as looks

    console = _console()
    with _wrong_input():
        settings = Settings.from_additional_config(_config(additional_config))
    fits = _tell_vllm(console)
    console.print(Text("engines", style="bold"))
    for engine in looks.engines():
        version = engine.version or "not installed"
        served = "" if engine.is_served else ", which this version does not use"
        console.print(Text(f"  {engine.package}: {version}{served}"))
    console.print(Text("settings", style="bold"))
    for name, value, is_default in looks.settings_lines(settings):
        console.print(Text(f"  {name} = {value}" + ("" if is_default else "  (set)")))
    if not (fits and any(engine.version and engine.is_served for engine in looks.engines())):
        raise typer.Exit(REFUSED)


def _tell_vllm(console: Console) -> bool:
    """Print vLLM's version and each seam; whether all hold."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        found = vllm_lazy_grammar.seams()
        console.print(Text(vllm_lazy_grammar.vllm_version(), style="bold"))
    except ImportError as error:
        console.print(Text(f"vLLM can not be imported: {error}", style="red"))
        return False
    for seam in found:
        held = Text("holds", style="green") if not seam.complaints else Text("does not hold", style="bold red")
        console.print(Text("  ") + held + Text(f"  {seam.target}: {seam.why}"))
        for complaint in seam.complaints:
            console.print(Text(f"      found: {complaint}", style="red"))
    return not any(seam.complaints for seam in found)


def _config(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingsError("--additional-config", text, f"this is no JSON: {error}") from error


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="A trace file, or a folder of them: the newest.")],
    html: Annotated[Path | None, typer.Option(help="Write a page that shows it, in one file.")] = None,
) -> None:
    """Show what a server wrote down of a request. Status 0: shown, 2: wrong input."""
    from vllm_lazy_grammar.cli import page

    with _wrong_input():
        found = stories.read(_newest(file) if file.is_dir() else file)
        if html is not None:
            _write("--html", html, page.page(found))
            return
    console = _console()
    console.print(Text(f"request {found[0]['request']}, {found[0]['time']}"))
    show.summary(console, found)
    for line in found[1:-1]:
        for event in line.get("events", ()):
            console.print(Text(f"#{line['n']}: {show.told_event(event)}"))


def _newest(folder: Path) -> Path:
    found = sorted(folder.glob("trace-*.jsonl"))
    if not found:
        raise RequestError("FILE", str(folder), "there is no trace in this folder")
    return found[-1]


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise RequestError(option, str(path), f"this file can not be written: {error}") from error
