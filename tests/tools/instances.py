"""Random tools with awkward names and schemas, and arguments that obey them."""

from __future__ import annotations

import random

NAMES = ["get", "get_weather", "getWeather2", "a_b", "search_web", "x"]
AWKWARD = ["a.b-c", 'a.b-c"é', "größe", "ns/tool", "f(x)", "what?*"]
KEYS = ["city", "days", "unit", "q", "max_results", "is_open", "tags", "filters", "from_date", "k9", "from"]
ODD_KEYS = ["a-b", "größe", "x.y", "with space"]
TEXTS = [
    "Paris",
    "a b",
    'café "best"',
    "日本語 🌸",
    "line\nbreak",
    "it's",
    "x, y; z",
    "{curly}",
    "C:\\dir",
    "50%",
    "e=mc²",
    "true story",
]


def scalar(rng):
    """A schema of one value, and a value of it."""
    kind = rng.randrange(8)
    if kind == 0:
        values = rng.sample(["c", "f", "red one", "zß"], 2)
        return {"type": "string", "enum": values}, rng.choice(values)
    if kind == 1:
        return {"type": "integer"}, rng.choice([0, 3, -12, 1000])
    if kind == 2:
        return {"type": "number"}, rng.choice([1.5, -0.25, 3, 12.75])
    if kind == 3:
        return {"type": "boolean"}, rng.random() < 0.5
    if kind == 4:
        return {"type": "integer", "minimum": 1, "maximum": 9}, rng.randint(1, 9)
    return {"type": "string"}, rng.choice(TEXTS)


def value(rng, depth):
    """A schema that may nest, and a value of it."""
    kind = rng.randrange(6) if depth else 0
    if kind == 4:
        item, _ = scalar(rng)
        return {"type": "array", "items": item}, [example(rng, item) for _ in range(rng.randrange(3))]
    if kind == 5:
        return parameters(rng, depth - 1, odd=False)
    return scalar(rng)


def example(rng, schema):
    """One more value of a scalar's schema."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "minimum" in schema:
        return rng.randint(schema["minimum"], schema["maximum"])
    choices = {"integer": [1, 2, -7], "number": [0.5, 2.25], "boolean": [True, False], "string": TEXTS}
    return rng.choice(choices[schema["type"]])


def parameters(rng, depth=2, *, odd=True):
    """The schema of an object, and an object of it."""
    keys = rng.sample(KEYS, rng.randrange(1, 5)) + (rng.sample(ODD_KEYS, rng.randrange(2)) if odd else [])
    properties, found, required = {}, {}, []
    for key in keys:
        properties[key], one = value(rng, depth)
        if rng.random() < 0.6:
            required.append(key)
        if key in required or rng.random() < 0.5:
            found[key] = one
    schema = {"type": "object", "properties": properties, "required": required}
    return schema, found


def with_reference(rng):
    """A schema with definitions, and an object of it."""
    schema = {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}, "n": {"type": "integer"}},
        "required": ["place"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "at": {"$ref": "#/$defs/at"}},
                "required": ["name"],
            },
            "at": {"type": "array", "items": {"type": "integer"}},
        },
    }
    return schema, {"place": {"name": rng.choice(TEXTS), "at": [1, 2]}, "n": 4}


def tool_and_arguments(rng, *, awkward):
    """A tool in the shape of a request, and arguments for it."""
    name = rng.choice(AWKWARD if awkward and rng.random() < 0.3 else NAMES)
    kind = rng.randrange(10)
    if kind == 0:
        return {"type": "function", "function": {"name": name}}, {}
    if kind == 1:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}, {}
    schema, found = with_reference(rng) if kind == 2 else parameters(rng, odd=awkward)
    return {"type": "function", "function": {"name": name, "parameters": schema}}, found


def tools_and_calls(seed, *, awkward=True, tools=3, calls=2):
    """Tools of different names, and calls to some of them."""
    rng = random.Random(seed)  # noqa: S311 - the same in every run
    found = {}
    while len(found) < tools:
        tool, arguments = tool_and_arguments(rng, awkward=awkward)
        found.setdefault(tool["function"]["name"], (tool, arguments))
    chosen = [rng.choice(list(found)) for _ in range(rng.randint(1, calls))]
    return [tool for tool, _ in found.values()], [(name, found[name][1]) for name in chosen]
