"""The page and the dashboard name the metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vllm_lazy_grammar.core.counts import METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/metrics.md"
DASHBOARD = ROOT / "configs/grafana.json"


def row(metric):
    values = ", ".join(f"`{value}`" for value in metric.values)
    label = f"`{metric.label}`: {values}" if metric.label else ""
    return f"| `{metric.name}` | {metric.type} | {label} | {metric.unit} | {metric.help} |"


def expressions(node):
    """All queries in a dashboard."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key in ("expr", "definition"))
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from expressions(each)


def asked_for():
    return [name for text in expressions(json.loads(DASHBOARD.read_text())) for name in re.findall(r"lazy_grammar_\w+", text)]  # fmt: skip


def samples(metric):
    """The names under which a metric can be asked for."""
    histogram = [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
    return histogram if metric.type == "histogram" else [metric.name]


def test_the_page_has_a_row_of_each_metric_and_no_other():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `lazy_grammar_")]
    assert rows == [row(metric) for metric in METRICS]


def test_each_metric_that_the_dashboard_asks_for_exists():
    known = {name for metric in METRICS for name in samples(metric)}
    assert [name for name in asked_for() if name not in known] == []


def test_the_dashboard_shows_each_metric():
    shown = set(asked_for())
    assert [metric.name for metric in METRICS if shown.isdisjoint(samples(metric))] == []


def test_the_dashboard_asks_for_labels_that_there_are():
    labels = {metric.label for metric in METRICS if metric.label} | {"model_name", "engine", "le"}
    by = [label for text in expressions(json.loads(DASHBOARD.read_text())) for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(", ")]  # fmt: skip
    assert by
    assert set(by) <= labels
