"""The reference of all settings, made of the settings classes: the commented example,
`docs/guide/configuration.md`, and the schema of the settings that the Helm chart takes.

`python -m tools.reference` writes them into `docs/guide` and `deploy/helm`.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrs.config.document import WIDTH, KeyPath, comment, commented_yaml, flow
from kvrs.config.file import Config
from kvrs.config.schema import DOCS_PAGE, description, json_schema
from kvrs.config.settings import ENGINES

_HEADER = (
    "Every key of the configuration with its default. A file only needs the settings that differ. "
    "`kvrs config check FILE` reports all mistakes at once, `kvrs config init` writes a first file."
)
_ROOT = Path(__file__).parents[1]
_GUIDE = _ROOT / "docs" / "guide"
_CHART_SCHEMA = _ROOT / "deploy" / "helm" / "values.schema.json"


# A value with `${NAME}`, which the pod replaces by its environment.
_VARIABLE = r"\$\{"
_NO_CONSTRAINTS = ("title", "description", "default", "format", ENGINES)


def chart_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of the chart's values with that of the settings below `config`, where each
    value may be `${NAME}` too.
    """
    config = json_schema()
    given = {name: _in_chart(node) for name, node in config["$defs"].items()}
    whole = {key: config[key] for key in ("type", "properties", "additionalProperties")}
    properties = {**schema["properties"], "config": _in_chart(whole)}
    return {**schema, "$defs": given, "properties": properties}


def _in_chart(node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        return {"$ref": node["$ref"]}
    if "anyOf" in node:
        return {"anyOf": [_in_chart(each) for each in node["anyOf"]]}
    made = {key: value for key, value in node.items() if key not in _NO_CONSTRAINTS}
    if "enum" in made:
        return {"anyOf": [{"enum": made["enum"]}, {"pattern": _VARIABLE}]}
    match made["type"]:
        case "object":
            found = {key: _in_chart(each) for key, each in made.get("properties", {}).items()}
            return made | {"type": ["object", "null"], "properties": found}  # null: all defaults.
        case "array":
            return made | {"items": _in_chart(made["items"])}
        case "string" if "pattern" in made:
            return made | {"pattern": f"({made['pattern']})|{_VARIABLE}"}
        case "string" | "null":
            return made
        case kind:  # `pattern` counts for strings alone, ranges for numbers.
            return made | {"type": [kind, "string"], "pattern": _VARIABLE}


def resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """A node of a JSON schema without references; of something or null, the something."""
    for each in node.get("anyOf", ()):
        if each.get("type") != "null":
            return resolved(schema, each)
    if "$ref" in node:
        found: dict[str, Any] = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
        return found
    return node


def example() -> str:
    """A YAML file with every key at its default."""
    header = "\n".join(comment(_HEADER))
    return f"{header}\n\n{commented_yaml(Config().model_dump(mode='json'), _of_first_items)}"


def markdown() -> str:
    """`docs/guide/configuration.md`: a table for each section."""
    schema = json_schema()
    defaults = Config().model_dump(mode="json")
    parts = [_INTRODUCTION]
    for section, given in schema["properties"].items():
        meaning = _with_links(given["description"])
        parts += [f"\n## {section}\n", *textwrap.wrap(meaning, WIDTH), ""]
        parts += ["| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
        node = resolved(schema, given)
        if "items" in node:
            parts += _rows(schema, resolved(schema, node["items"]), "[].", {})
        else:
            parts += _rows(schema, node, "", defaults[section])
    return "\n".join(parts) + "\n"


def _of_first_items(path: KeyPath) -> str | None:
    """In the example only the first item of a list has comments."""
    return None if any(part for part in path if isinstance(part, int)) else description(path)


def _rows(
    schema: dict[str, Any], section: dict[str, Any], above: str, defaults: dict[str, Any]
) -> Iterator[str]:
    """A line of the table for each key."""
    for key, given in section["properties"].items():
        node = resolved(schema, given)
        default = defaults.get(key, given.get("default"))
        is_section = "properties" in node
        if not is_section or default is None:
            shown = "-" if key in section.get("required", ()) else _default(default)
            meaning = _with_links(given["description"])
            allowed = _allowed(schema, given)
            yield f"| `{above}{key}` | {shown} | {allowed} | {meaning} |"
        if is_section and node["title"] in _titles(schema):
            continue  # It has a table of its own.
        if is_section:
            yield from _rows(schema, node, f"{above}{key}.", default or {})
        elif "properties" in (item := resolved(schema, node.get("items", {}))):
            yield from _rows(schema, item, f"{above}{key}[].", {})


def _titles(schema: dict[str, Any]) -> set[str]:
    """Those of the sections of the file."""
    nodes = (resolved(schema, given) for given in schema["properties"].values())
    return {node["title"] for node in nodes if "properties" in node}


def _with_links(text: str) -> str:
    """Names of pages as links that work in the guide."""
    return DOCS_PAGE.sub(
        lambda page: f"[{page[2]}]({'' if page[1] == 'guide' else '../research/'}{page[2]})", text
    )


def _default(value: Any) -> str:
    if isinstance(value, list) and value:
        return "see [the example](kvrs.example.yaml)"
    return f"`{flow(value)}`"


def _allowed(schema: dict[str, Any], given: dict[str, Any]) -> str:
    alternatives = given.get("anyOf", [given])
    return " or ".join(_one_allowed(schema, each) for each in alternatives)


def _one_allowed(schema: dict[str, Any], given: dict[str, Any]) -> str:
    node = resolved(schema, given)
    if "enum" in node:
        return ", ".join(f"`{flow(value)}`" for value in node["enum"])
    match node.get("type"):
        case "object":
            return "a section"
        case "array":
            items = resolved(schema, node["items"])
            return "a list" + (" of sections" if "properties" in items else " of text")
        case "string":
            return "text"
        case "boolean":
            return "`true`, `false`"
        case "integer" | "number" as kind:
            return f"{'a whole number' if kind == 'integer' else 'a number'}{_range(node)}"
        case other:
            return str(other)


def _range(node: dict[str, Any]) -> str:
    if "minimum" in node and "maximum" in node:
        return f" from {node['minimum']:,} to {node['maximum']:,}"
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "greater than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
    }
    bounds = [f"{word} {node[key]:,}" for key, word in words.items() if key in node]
    if not bounds:
        return ""
    return (", " if bounds[0].startswith("at") else " ") + ", ".join(bounds)


_INTRODUCTION = """\
# Configuration

Every process of kvrs reads one YAML file, which only needs the settings that differ from their
defaults. [kvrs.example.yaml](kvrs.example.yaml) contains all settings. Begin with `kvrs config
init`:

| command | what it does |
| --- | --- |
| `kvrs config init FILE --for ENGINE` | writes a first file with comments, for `vllm`, `sglang`, \
`distserve` or `embedded` |
| `kvrs config check FILE ...` | reports everything that is wrong with files, and starts nothing |
| `kvrs config show FILE` | prints the configuration in effect and the origin of each value, \
without defaults that the engine does not read (`--json`: with them) |
| `kvrs config schema` | prints the JSON schema, for editors and other checkers |

An unknown key, or a value of the wrong type or out of range, is an error. Numbers may have an
exponent (`20e6`), but no unit: the end of a key is its unit. `[]` in a key stands for each item of
a list.

`kvrs config check` also finds values that are in range but cannot work: missing files, certificates
and models, KV pages that hold no request of `max_model_len` or exceed the memory, checkpoints that
exceed it, a port that is used twice. `--elsewhere` checks a file for other machines, without
looking for the files that it names. `kvrs proxy` refuses a file for the same reasons, except for
missing files that only engines or agents read.

This page and the example are generated from the settings classes in `kvrs/config` by `make
reference`.

## The environment

An environment variable overrides a setting of the file, and a command-line option overrides both.
`kvrs config show` names the variable beside the value.

| variable | sets |
| --- | --- |
| `KVRS_PROXY__PORT=80` | `proxy.port`: the path in capitals, two underscores between its parts |
| `KVRS_SECURITY__HOSTS='[gpu-1, gpu-2]'` | a whole list or section, as YAML or JSON |

Values are YAML, as in the file: quote text that looks like a number once more
(`KVRS_PROXY__ID='"7"'`). A list is set as a whole; for one item of it use `${NAME}` in the file. A
variable with two underscores that names no setting is an error, and the message names the nearest
setting. A variable with one underscore is not a setting, because Kubernetes sets `KVRS_PORT` for a
service called `kvrs`; `kvrs config check` reports one that looks like a setting or a section.

`${NAME}` in a value of the file is replaced by the variable NAME, which must be set.
`${NAME:-default}` is replaced by the default if the variable is not set or empty, and `$${` by a
literal `${`. Without quotes the result is read as YAML, so `port: ${PORT}` is a number; in quotes
it is text.

```yaml
cluster:
  nodes:
  - id: ${NODE_NAME}
    instances:
    - id: ${HOSTNAME}
      role: decode
      host: ${POD_IP}
      port: ${PORT:-9000}
```

`kvrs lab up`, `proxy`, `agent`, `lab simulate` and `config` read the environment; processes that
`kvrs lab up` starts do not read it again. Secrets are not settings: `KVRS_SECRET`,
`KVRS_ADMIN_TOKEN`, `KVRS_KEYS`, `KVRS_VLLM_API_KEY` and `KVRS_SGLANG_API_KEY` are read where they
are used, are never shown, and are refused in `${}`."""


def main() -> None:
    """Write the example and the page into the guide of the checkout, and the chart's schema."""
    chart = chart_schema(json.loads(_CHART_SCHEMA.read_text(encoding="utf-8")))
    for path, text in (
        (_GUIDE / "kvrs.example.yaml", example()),
        (_GUIDE / "configuration.md", markdown()),
        (_CHART_SCHEMA, json.dumps(chart, indent=2) + "\n"),
    ):
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
