"""Files are parsed by libyaml, and read as PyYAML's own parser reads them."""

from pathlib import Path

import pytest
import yaml

from kvrs.config import document as yaml_document
from kvrs.config.file import Config, dump_config, load_config
from kvrs.config.presets import SystemPreset
from kvrs.errors import ConfigError

DOCUMENTS = [
    "a: 20e6\nb: 3.0e6\nc: 1e-3\nd: [.5, -1, 0o7, 010, ~, null, yes, 'no', 1_000]\n",
    "a: &one {b: [1, {c: x}]}\nd: *one\n<<: {e: 2}\n",
    "a: |\n  two\n  lines\nb: >-\n  folded\n  text\nc: '${X}'\nd: ${X:-8}\n",
    "- é\n- \"\\u00e9\\t\"\n- 2026-03-04\n# a comment\n- ''\n-\n",
    "",
    "# nothing\n",
]


@pytest.mark.parametrize(
    "text",
    [*DOCUMENTS, dump_config(Config()), *(each.path.read_text() for each in SystemPreset)],
)
def test_both_parsers_read_the_same(text: str) -> None:
    """Values, and the lines at which they stand."""
    found = []
    for kind in (yaml_document._YamlLoader, yaml_document._LibyamlLoader):
        loader = kind(text)
        root = loader.get_single_node()
        lines = [] if root is None else lines_of(root)
        found.append((lines, None if root is None else loader.construct_document(root)))

    assert found[0] == found[1]


def lines_of(node: yaml.Node) -> list[int]:
    below = []
    if isinstance(node, yaml.MappingNode):
        below = [each for pair in node.value for each in pair]
    elif isinstance(node, yaml.SequenceNode):
        below = node.value
    return [node.start_mark.line, *(line for each in below for line in lines_of(each))]


def test_a_file_that_libyaml_refuses_is_shown_where_it_is_wrong(tmp_path: Path) -> None:
    """With the text of the line, which libyaml does not tell."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("slo: {}\nproxy: {port: 1]\n")

    with pytest.raises(ConfigError, match=r"line 2, column 16: proxy: \{port: 1\] \^"):
        load_config(path)


def test_what_is_written_is_quoted_where_it_would_be_a_number() -> None:
    """Text of YAML 1.1 that is a number of YAML 1.2."""
    document = {"a": "20e6", "b": "1e-3", "c": "x: y", "d": 2.5, "e": None}

    text = yaml_document.dump_yaml(document)

    assert yaml_document.parse_yaml(text) == document
    assert "a: '20e6'" in text
