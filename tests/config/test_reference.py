"""Schema, example and the page of the settings: made of their classes, and never stale."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, Draft202012Validator  # type: ignore[import-untyped]

from kvrs.config.cluster import Backend
from kvrs.config.file import Config, leaves, load_config
from kvrs.config.schema import _NAMES, description, first_file, json_schema
from tools.reference import chart_schema, example, markdown

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
MOST_SETTINGS = 25  # Of a first file.
CHART_SCHEMA = ROOT / "deploy" / "helm" / "values.schema.json"


@pytest.mark.parametrize(
    ("name", "made"), [("kvrs.example.yaml", example), ("configuration.md", markdown)]
)
def test_the_docs_are_made_of_the_settings_classes(name: str, made: Any) -> None:
    """`make reference` writes them again."""
    assert (GUIDE / name).read_text() == made()


def test_the_chart_takes_what_the_settings_take() -> None:
    """The schema has their names, types, ranges and enums, and `${NAME}` for any value; `make
    reference` writes it again.
    """
    text = CHART_SCHEMA.read_text()
    schema = json.loads(text)
    validator = Draft7Validator(schema)
    instance = {"id": "p0", "role": "prefill", "port": "${PORT}"}
    by_name = {
        "proxy": {"id": "${POD}", "workers": "${WORKERS:-2}", "allow_anonymous": "${OPEN}"},
        "policy": {"name": "${POLICY}"},
        "cluster": {"nodes": [{"id": "${NODE}-0", "instances": [instance]}]},
    }

    assert text == json.dumps(chart_schema(schema), indent=2) + "\n"
    for right in (yaml.safe_load(example()), by_name, {"slo": None}):
        assert list(validator.iter_errors({"config": right})) == []
    instances = [instance | {"prot": 1}], [{"id": "p0"}]
    wrong: list[dict[str, Any]] = [
        {"proxies": {}},
        {"proxy": {"wokers": 2}},
        {"proxy": {"workers": 0}},
        {"proxy": {"workers": "two"}},
        {"proxy": {"tls": {"cert": "a", "key": "b", "certificate": "c"}}},
        {"proxy": {"allow_anonymous": 1}},
        {"policy": {"name": "foo"}},
        {"policy": {"recovery": {"wait": 3}}},
        *({"cluster": {"nodes": [{"id": "n0", "instances": each}]}} for each in instances),
        {"slo": []},
    ]
    assert [each for each in wrong if validator.is_valid({"config": each})] == []


def test_every_key_has_a_description() -> None:
    """In the schema, for editors, also within sections that are null by default."""
    schema = json_schema()
    models = [schema, *schema["$defs"].values()]
    bare = [
        f"{model.get('title')}.{key}"
        for model in models
        for key, given in model.get("properties", {}).items()
        if not given.get("description")
    ]

    assert bare == []
    assert all(description(path) for path, _ in leaves(Config().model_dump(mode="json")))


def test_the_schema_takes_what_the_program_takes() -> None:
    """The example is valid, and so is every first file."""
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)

    assert list(validator.iter_errors(yaml.safe_load(example()))) == []
    for backend in Backend:
        assert list(validator.iter_errors(yaml.safe_load(first_file(backend)))) == []


@pytest.mark.parametrize(
    "document",
    [
        {"proxy": {"prot": 1}},
        {"proxy": {"port": 70000}},
        {"policy": {"name": "fastest"}},
        {"cluster": {"nodes": [{"id": "n0", "instances": [{"id": "p0"}]}]}},
    ],
)
def test_the_schema_refuses_what_the_program_refuses(document: Any) -> None:
    """Unknown keys, ranges, names of policies, missing keys."""
    assert list(Draft202012Validator(json_schema()).iter_errors(document))


@pytest.mark.parametrize("backend", Backend)
def test_a_first_file_is_valid_and_has_comments(backend: Backend, tmp_path: Path) -> None:
    """The file has the requested backend and few settings, none of another engine; a comment
    explains each section.
    """
    path = tmp_path / "kvrs.yaml"
    path.write_text(first_file(backend))

    config = load_config(path)
    given = [path for path, _ in leaves(config.model_dump(mode="json", exclude_unset=True))]

    assert config.cluster.backend is backend
    above = {path[:length] for path in given for length in range(1, len(path) + 1)}
    marks = [text.partition(".")[0] for each in above if (text := description(each))]
    assert all(_NAMES[backend] in mark for mark in marks if mark.startswith("Only for"))
    assert len(given) <= MOST_SETTINGS
    assert "policy:  # Admission, hand-off and recovery" in path.read_text()
    assert max(len(line) for line in path.read_text().splitlines()) <= 100
