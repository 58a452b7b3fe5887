"""The directions of the imports, read from the source, and what importing the package may load."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "vllm_lazy_grammar"
PACKAGE = Path(__file__).resolve().parents[1] / NAME

MAY_IMPORT = {
    "errors": set(),
    "settings": {"errors"},
    "core": {"errors", "core"},
    "engines": {"errors", "core", "engines"},
    "tools": {"errors", "core", "tools"},
    "testing": {"errors", "core", "testing"},
    "_seams": {"errors"},
    "plugin": {"errors", "_seams", "plugin"},
    "adapter": {"errors", "core", "engines", "tools", "settings", "adapter"},
    "cli": {"errors", "core", "engines", "tools", "settings", "cli"},
    "__init__": {"errors", "core", "tools", "settings", "plugin"},
}
"""Layer -> what it may import of ours. Inside functions the plugin may import the adapter."""

INSIDE_FUNCTIONS = {"plugin": {"adapter"}}

FOREIGN = {
    "vllm": {"adapter", "plugin"},
    "torch": {"adapter", "plugin", "engines/xgrammar"},
    "xgrammar": {"engines/xgrammar"},
    "llguidance": {"engines/guidance"},
    "glrmask": {"engines/glrmask"},
    "prometheus_client": {"adapter/metric"},
}
"""Foreign package -> the layers, or beginnings of paths, that may import it."""

CORE_MAY_IMPORT = {"numpy", "regex", "numba"}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST, *, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported module's full name, and whether the import stands inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            names = [f"{NAME}.{alias.name}" for alias in node.names] if node.module == NAME else [node.module]
            yield from ((name, in_function) for name in names)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, in_function=inside)


@functools.cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    return list(imports(ast.parse(path.read_text(), str(path))))


def wrong_directions(layer: str, found: list[tuple[str, bool]]) -> list[str]:
    ours = [(name.split(".")[1], inside) for name, inside in found if name.startswith(f"{NAME}.")]
    allowed = MAY_IMPORT[layer]
    deferred = INSIDE_FUNCTIONS.get(layer, set())
    return [target for target, inside in ours if target not in allowed and not (inside and target in deferred)]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_layer_imports_only_the_layers_below_it(path: Path) -> None:
    assert wrong_directions(layer_of(path), imports_of(path)) == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_foreign_package_is_imported_only_by_its_own_place(path: Path) -> None:
    place = str(path.relative_to(PACKAGE))
    roots = {name.split(".")[0] for name, _ in imports_of(path)}
    assert [name for name in roots & FOREIGN.keys() if not place.startswith(tuple(FOREIGN[name]))] == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=lambda path: path.name)
def test_the_core_knows_the_standard_library_numpy_regex_and_numba_only(path: Path) -> None:
    roots = {name.split(".")[0] for name, _ in imports_of(path)}
    assert roots - sys.stdlib_module_names - CORE_MAY_IMPORT == roots & {NAME}


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("core", "from vllm_lazy_grammar.engines import xgrammar"),
        ("core", "from vllm_lazy_grammar import engines"),
        ("core", "def f():\n    import vllm_lazy_grammar.adapter.manager"),
        ("engines", "from vllm_lazy_grammar.adapter.manager import Manager"),
        ("plugin", "from vllm_lazy_grammar.adapter.manager import Manager"),
        ("errors", "from vllm_lazy_grammar.core.gate import Gate"),
    ],
)
def test_an_import_against_the_direction_is_found(layer: str, source: str) -> None:
    assert wrong_directions(layer, list(imports(ast.parse(source))))


def test_the_plugin_may_import_the_adapter_inside_functions() -> None:
    source = "def f():\n    from vllm_lazy_grammar.adapter.manager import Manager"
    assert wrong_directions("plugin", list(imports(ast.parse(source)))) == []


@pytest.mark.parametrize("module", [NAME, f"{NAME}.plugin"])
def test_importing_the_package_loads_neither_vllm_nor_torch_nor_xgrammar(module: str) -> None:
    source = f"import sys, {module}; print(*({{'vllm', 'torch', 'xgrammar'}} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert loaded.stdout.split() == []
