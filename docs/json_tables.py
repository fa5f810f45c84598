"""Writes docs/json.md from the JSON Schema that comes with the package.

python docs/json_tables.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axisnorm.lens.result import json_schema

TARGET = Path(__file__).parent / "json.md"

HEAD = """\
# Results as JSON

Every result of the lens has `to_json()`, and every command of the command line has `--json`. Both
give one JSON object of which the first name, `schema`, says what it is and in which version:

```
$ axisnorm compare "... [d]" "b [s d]" --shape 2,3,4 --json
{
  "schema": "axisnorm.comparison/1",
  "shape": [2, 3, 4],
  "same": false,
  "statistics": "different",
  ...
```

**What is stable.** As long as the number after the slash is 1, every name below is there, with
this type and this meaning. Names may be added: a reader should pass over those that it does not
know. Sentences (`differences`, `notes`, `message`, ...) are for people, their wording may change;
verdicts, numbers, schemes and codes are for programs.

**Numbers.** JSON has no NaN and no infinity: both are `null`. Arrays are nested lists in row-major
order; those of more than 4096 elements are `null`, their shape is always there.

**Schemes** are texts in the notation, as in `"... [d]; affine=d; eps=1e-12"`.
`axisnorm.Scheme(text)` reads them, and equal schemes have equal texts.

The same as a JSON Schema (draft 2020-12) comes with the package:
`axisnorm.lens.result.json_schema()`.

| command | function | `schema` |
| --- | --- | --- |
| `axisnorm explain SCHEME SHAPE` | `axisnorm.explain` | `axisnorm.explanation/1` |
| `axisnorm compare A B --shape SHAPE` | `axisnorm.compare` | `axisnorm.comparison/1` |
| `axisnorm identify ...` | `axisnorm.identify` | `axisnorm.identification/1` |
| `axisnorm audit MODEL` | `axisnorm.audit` | `axisnorm.audit/1` |
| `axisnorm audit A --diff B` | `axisnorm.audit(...).diff(other)` | `axisnorm.differences/1` |
| `axisnorm audit A --swap` | `axisnorm.swap` | `axisnorm.swap/1` |
| `axisnorm audit A.onnx --fuse B.onnx` | `axisnorm.lens.onnx.fusing.fuse` | `axisnorm.swap/1` |
| `axisnorm bench SCHEME SHAPE` | `axisnorm.bench` | `axisnorm.benchmark/1` |
| `axisnorm presets` | `axisnorm.PRESETS` | `axisnorm.presets/1` |

Exit statuses of the command line: 0 fine; 1 with `--strict`, where `audit` has an error or a
warning among its findings (notes do not count), the norms of `--diff` differ, or `--fuse` leaves a
norm that is written out; 2 wrong use or bad input, with one line on standard error, and nothing
written.
"""


def main() -> None:
    TARGET.write_text(text())


def text() -> str:
    """The whole page."""
    schema = json_schema()
    definitions = schema["$defs"]
    kinds = [_name(one) for one in schema["oneOf"]]
    tables = [_table(definitions, kind, "##") for kind in kinds]
    inner = [name for name, one in definitions.items() if "properties" in one and name not in kinds]
    tables += ["## Parts\n"]
    tables += [_table(definitions, name, "###") for name in inner]
    return "\n".join([HEAD, *tables])


def _name(reference: dict[str, str]) -> str:
    return reference["$ref"].rsplit("/", 1)[1]


def _table(definitions: dict[str, Any], name: str, level: str) -> str:
    one = definitions[name]
    lines = [
        f"{level} {name}",
        "",
        one["description"],
        "",
        "| name | type | |",
        "| --- | --- | --- |",
    ]
    for key, value in one["properties"].items():
        said = value.get("description") or _described(definitions, value)
        lines.append(f"| `{key}` | {_type(definitions, value)} | {said} |")
    return "\n".join([*lines, ""])


def _described(definitions: dict[str, Any], value: dict[str, Any]) -> str:
    """The description of what is referred to, where it is no table of its own."""
    if "$ref" not in value:
        return ""
    target = definitions[_name(value)]
    return "" if "properties" in target else str(target.get("description", ""))


def _type(definitions: dict[str, Any], value: dict[str, Any]) -> str:
    if "const" in value:
        return f'`"{value["const"]}"`'
    if "enum" in value:
        return ", ".join("null" if one is None else f'`"{one}"`' for one in value["enum"])
    if "$ref" in value:
        name = _name(value)
        target = definitions[name]
        if "properties" in target:
            return f"[{name}](#{name})"
        if name == "nested":
            return "array or null"
        return {"shape": "list of int", "scheme": "scheme"}.get(name) or _type(definitions, target)
    if "anyOf" in value:
        said = [_type(definitions, one) for one in value["anyOf"]]
        if {"$ref": "#/$defs/nested"} in [one.get("items") for one in value["anyOf"]]:
            return "array or null"
        return " or ".join(said)
    if value["type"] == "array":
        return f"list of {_type(definitions, value['items'])}"
    if value["type"] == "object":
        inner = ", ".join(f"`{key}`" for key in value["properties"])
        return f"object of {inner}"
    kinds = value["type"] if isinstance(value["type"], list) else [value["type"]]
    short = {"string": "text", "integer": "int", "boolean": "true or false"}
    return " or ".join(short.get(kind, kind) for kind in kinds)


if __name__ == "__main__":
    main()
