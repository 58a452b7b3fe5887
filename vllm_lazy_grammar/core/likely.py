"""What a grammar's source says of choices: which key comes first, which of two spellings a family was trained on. For guesses only.

Invariants:
- Nothing here decides what is legal: whoever guesses asks the grammar.
- A source that can not be read says nothing.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_lazy_grammar.core.matcher import GrammarKey

Path = tuple[bytes | None, ...]
"""The way from a JSON value to one inside it: keys as JSON writes them, None for a place in a list."""

_DEPTH = 8
_EITHER = ("anyOf", "oneOf", "allOf")


class Likely:
    """Guesses for one grammar; immutable but for what it remembers, shared.

    Args:
        schemas: the JSON schemas that its values obey.
        forks: texts of which one comes, the likeliest first.
        anywhere: whether a schema may begin inside the JSON that is written, so that the first keys of a path are not its own.
    """

    def __init__(
        self, schemas: Sequence[Any], forks: Sequence[tuple[bytes, ...]] = (), *, anywhere: bool = False
    ) -> None:
        self._schemas, self._forks, self._anywhere = schemas, forks, anywhere
        self.keys = lru_cache(256)(self._keys)

    def _keys(self, path: Path) -> tuple[bytes, ...]:
        """Keys of the object at a path as JSON writes them: the required ones first, as they were declared."""
        for start in range(len(path) + 1 if self._anywhere else 1):
            nodes = [node for schema in self._schemas for node in _reached(schema, path[start:])]
            if nodes:
                return tuple(dict.fromkeys(_names(nodes)))
        return ()

    def fork(self, text: bytes, nexts: bytes) -> bytes:
        """The rest of the likeliest text where the choice is between such texts; empty where it is another choice.

        Args:
            text: the end of what is written.
            nexts: the bytes that may come next.
        """
        for texts in self._forks:
            common = _common(texts)
            ways = {t[len(common)] for t in texts if len(t) > len(common)}
            # Where one text is the beginning of the others, what may follow it stands beside them.
            if text.endswith(common) and (ways < set(nexts) if common in texts else ways == set(nexts)):
                return texts[0][len(common) :]
        return b""


@lru_cache(256)
def likely(key: GrammarKey) -> Likely:
    """The guesses that a grammar's source allows."""
    if key.kind == "json":
        return Likely([json.loads(key.source)])
    if key.kind != "structural_tag":
        return Likely([])
    tag = json.loads(key.source)
    return Likely(list(_schemas(tag)), list(dict.fromkeys(_forks(tag))), anywhere=True)


def _common(texts: Sequence[bytes]) -> bytes:
    """What all texts begin with."""
    low, high = min(texts), max(texts)
    size = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:size]


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """The parts of a structural tag, itself first; schemas are not looked into."""
    if isinstance(node, dict):
        yield node
    inner = (
        node
        if isinstance(node, list)
        else [v for k, v in node.items() if k != "json_schema"]
        if isinstance(node, dict)
        else []
    )
    for part in inner:
        yield from _nodes(part)


def _schemas(tag: Any) -> Iterator[Any]:
    return (node["json_schema"] for node in _nodes(tag) if "json_schema" in node)


def _forks(tag: Any) -> Iterator[tuple[bytes, ...]]:
    for node in _nodes(tag):
        parts = node.get("elements") if node.get("type") == "or" else None
        if isinstance(parts, list) and len(parts) > 1 and all(part.get("type") == "const_string" for part in parts):
            yield tuple(part["value"].encode() for part in parts)


def _reached(schema: Any, path: Path) -> list[dict[str, Any]]:
    nodes = list(_opened(schema, schema))
    for step in path:
        nodes = [found for node in nodes for part in _steps(node, step) for found in _opened(schema, part)]
    return nodes


def _names(nodes: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    for wanted in (True, False):
        for node in nodes:
            required, names = node.get("required"), node.get("properties")
            known = required if isinstance(required, list) else []
            yield from (
                _written(name) for name in (names if isinstance(names, dict) else ()) if (name in known) is wanted
            )


def _steps(node: dict[str, Any], step: bytes | None) -> Iterator[Any]:
    if step is None:
        yield node.get("items")
        return
    properties = node.get("properties")
    found = (
        [value for name, value in properties.items() if _written(name) == step] if isinstance(properties, dict) else []
    )
    yield from found or [node.get("additionalProperties")]


def _opened(root: Any, node: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The node, what it refers to, and its alternatives."""
    if not isinstance(node, dict) or depth > _DEPTH:
        return
    yield node
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield from _opened(root, _at(root, reference), depth + 1)
    for name in _EITHER:
        for part in node[name] if isinstance(node.get(name), list) else ():
            yield from _opened(root, part, depth + 1)


def _at(root: Any, reference: str) -> Any:
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _written(name: str) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode()[1:-1]
