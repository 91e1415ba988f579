"""The YAML file: every fault at once, each with its place, value and what is allowed."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.config.document import parse_yaml
from kvrs.config.file import (
    Config,
    config_digest,
    dump_config,
    load_config,
    parse_config,
    read_secret,
)
from kvrs.config.security import SecuritySettings
from kvrs.errors import ConfigError
from kvrs.profiles import catalog

TO_SET = (
    "allowed: a secret of at least 16 bytes, such as `openssl rand -hex 32` prints, or its file in "
    "security.secret_file"
)
EXAMPLE = Path(__file__).parents[2] / "docs" / "guide" / "kvrs.example.yaml"


def faults_of(document: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    return caught.value.faults


def test_every_fault_of_a_file_is_named_at_once() -> None:
    """A user mends a file in one go."""
    faults = faults_of(
        {"proxy": {"port": "x", "foo": 1}, "policy": {"name": "fastest", "slots_max": 0}}
    )

    assert len(faults) == 4
    assert any(line.startswith("proxy.port: got 'x'") for line in faults)
    assert any(
        line.startswith("proxy.foo: unknown key; allowed: ") and "admin_port" in line
        for line in faults
    )
    assert any("policy.name" in line and "'rom' or 'auto'" in line for line in faults)
    assert any(
        "policy.slots_max: got 0" in line and "greater than or equal to 1" in line
        for line in faults
    )


def test_a_page_size_that_no_engine_could_serve_is_found_before_one_starts() -> None:
    """Pages are parts of SIMD blocks; the mistake is found by the check of the file."""
    (fault,) = faults_of({"cluster": {"engine": {"page_size_tokens": 24}}})

    assert (
        fault == "cluster.engine.page_size_tokens: got 24; allowed: a power of two from 1 to 1024"
    )


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("proxy: {max_body_bytes: 10GB}", " (write 10e9, without a unit)"),
        ("proxy: {mirror_bytes: 2 MiB}", " (write 2097152, without a unit)"),
        ("transfer: {link_bytes_per_s: 25Gbit/s}", " (write 3125000000, without a unit)"),
        ("proxy: {drain_s: '10s'}", " (write 10: drain_s is in seconds)"),
        ("proxy: {token_gap_s: 500ms}", " (write 0.5: token_gap_s is in seconds)"),
        ("proxy: {port: '8000'}", " (without quotes)"),
        (
            "proxy: {port: http}",
            "; input should be a valid integer (allowed: at least 0, at most 65535)",
        ),
        (
            "proxy: {id: n 0}",
            "; allowed: letters, digits and `._-`, first a letter, a digit or `_`",
        ),
        ("proxy: {prot: 1}", "workers; the nearest one is port"),
        ("proxies: {port: 1}", "transfer; the nearest one is proxy"),
        ("gossip: {peers: []}", "probe_interval_s; the nearest one is proxy.peers"),
        ("policy: {ewma: 1}", "slots_max"),
        (
            "profiles: {prefill: llama-3.1-8b-h100}",
            "llama-3.1-8b-h100-vllm-tp1 (kvrs docs profiles)",
        ),
        ("proxy:\n\tport: 1", " (tabs are not allowed before a key: indent by spaces)"),
    ],
)
def test_a_fault_ends_with_what_was_probably_meant(tmp_path: Path, text: str, end: str) -> None:
    """Sizes and times with a unit, names with a slip, keys of another section, tabs."""
    path = tmp_path / "kvrs.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    (fault,) = caught.value.faults
    assert fault.endswith(end)


def test_a_whole_number_may_have_an_exponent(tmp_path: Path) -> None:
    """`10e9` where a key takes whole numbers alone; a fraction is refused there."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("proxy: {mirror_bytes: 10e9}\ntransfer: {link_bytes_per_s: 1.5e0}")

    config = load_config(path)

    assert (config.proxy.mirror_bytes, config.transfer.link_bytes_per_s) == (10**10, 1.5)
    path.write_text("proxy: {max_streams: 1.5e0}")
    with pytest.raises(
        ConfigError, match=r"max_streams: got 1\.5; input should be a valid integer"
    ):
        load_config(path)


@pytest.mark.parametrize("document", [[], "text", 3, {"nonsense": {}}])
def test_a_document_that_is_no_configuration_is_refused(document: Any) -> None:
    """Whatever YAML can hold is answered by faults, not by a crash."""
    assert faults_of(document)


def test_an_empty_file_is_the_default_configuration() -> None:
    """Every key has a default."""
    assert parse_config(None) == Config()


def test_unknown_keys_deep_in_a_list_name_what_is_allowed_there() -> None:
    """The place counts list items, and the allowed keys are those of that very section."""
    nodes = [
        {
            "id": "n0",
            "instances": [
                {"id": "p0", "role": "prefill"},
                {"id": "d0", "role": "decode", "prot": 1},
            ],
        }
    ]

    (fault,) = faults_of({"cluster": {"nodes": nodes}})

    assert fault.startswith(
        "cluster.nodes.0.instances.1.prot: unknown key; allowed: bind, group, "
        "host, id, page_port, port, pp, role, stage_hosts, tp"
    )


@pytest.mark.parametrize(
    "name", ["a/b", "../up", ".hidden", "two words", "line\n", ":memory", "-v"]
)
def test_a_name_that_is_no_part_of_a_path_is_refused(name: str) -> None:
    """They are in the paths of orders and in the names of log files."""
    nodes = [{"id": name, "instances": [{"id": name, "role": "both"}]}]

    faults = faults_of({"proxy": {"id": name}, "cluster": {"nodes": nodes}})

    assert [fault.partition(": ")[0] for fault in faults] == [
        "proxy.id",
        "cluster.nodes.0.id",
        "cluster.nodes.0.instances.0.id",
    ]


def test_ids_ports_and_roles_are_checked_across_sections() -> None:
    """Values are checked against each other: doubles, and a cluster that could never serve."""
    nodes = [
        {
            "id": "n0",
            "instances": [{"id": "p0", "role": "prefill", "port": 9000, "page_port": 9000}] * 2,
        }
    ]

    text = "\n".join(faults_of({"cluster": {"nodes": nodes}}))

    assert (
        "cluster.nodes.0.instances.1.id: got 'p0', which is the id of cluster.nodes.0.inst" in text
    )
    assert "no instance of role 'decode'" in text
    assert "port 127.0.0.1:9000 is used 4 times" in text


def test_an_id_that_another_has_is_named_by_its_place() -> None:
    """The ids of agents follow from those of nodes, and stand nowhere in the file."""
    prefill, decode = {"id": "p0", "role": "prefill"}, {"id": "agent-n0", "role": "decode"}
    nodes = [{"id": "n0", "instances": [prefill, decode]}]
    nodes.append({"id": "n0", "instances": [{"id": "d0", "role": "decode"}]})

    assert faults_of({"cluster": {"nodes": nodes}}) == [
        f"cluster.nodes.{path}; allowed: an id of its own"
        for path in (
            "1.id: got 'n0', which is the id of cluster.nodes.0",
            "0.instances.1.id: got 'agent-n0', which is the id of the agent of cluster.nodes.0",
        )
    ]


def test_services_are_of_vllm_alone() -> None:
    """Instances of other engines know their ids; the nodes of addresses have no agents."""
    service = {"id": "s", "host": "vllm.test", "port": 8000, "role": "both"}
    services = [service, {**service, "role": "decode"}, {**service, "role": "prefill"}]

    with_gossip = "\n".join(
        faults_of({"cluster": {"services": services}, "gossip": {"enabled": True}})
    )
    vllm = {"backend": "vllm", "nodes": [], "services": services[2:]}
    without = faults_of({"cluster": vllm})

    assert "cluster.services: got 3 with backend 'embedded'; allowed: none" in with_gossip
    assert "cluster.services: got 3 with gossip.enabled: true" in with_gossip
    assert "cluster.services: id 's' is used 3 times; allowed: once" in with_gossip
    assert "cluster.services: service 's' has role 'both'; allowed: prefill" in with_gossip
    assert without == ["cluster.nodes: no instance of role 'decode'; allowed: at least one"]
    for found in (services[1:2], [services[1], {**services[2], "id": "t"}]):
        parse_config({"cluster": vllm | {"services": found}})


def test_a_pace_that_says_not_how_long_a_load_takes_is_refused(tmp_path: Path) -> None:
    """An instance needs that of its profile at its start."""
    profile: dict[str, Any] = msgspec.to_builtins(catalog.profile("opt-13b-a100-vllm-tp1"))
    del profile["load"]
    file = tmp_path / "without.json"
    file.write_bytes(msgspec.json.encode(profile))

    (fault,) = faults_of({"cluster": {"engine": {"pace": str(file)}}})

    assert fault.partition("; allowed: ")[0] == f"cluster.engine.pace: '{file}' has no load time"


def test_a_dumped_configuration_reads_back_equal() -> None:
    """The launcher hands its resolved configuration to every process as a file. Text that
    looks like a number stays text.
    """
    pair = [{"id": "1e5", "role": "prefill"}, {"id": "d0", "role": "decode"}]
    named = parse_config({"cluster": {"nodes": [{"id": "n0", "instances": pair}]}})
    for config in (Config(), named):
        assert parse_config(parse_yaml(dump_config(config))) == config


def test_the_commented_example_holds_every_key_and_every_default() -> None:
    """The example is the reference of all keys, so it must not drift from the code."""
    assert load_config(EXAMPLE) == Config()
    assert yaml.safe_load(EXAMPLE.read_text()) == yaml.safe_load(dump_config(Config()))


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize("path", ["proxy.token_gap_s", "transfer.link_bytes_per_s", "slo.ttft_s"])
def test_numbers_are_finite(path: str, text: str) -> None:
    """Also where any number above 0 is allowed."""
    section, key = path.split(".")

    with pytest.raises(ConfigError, match=rf"^{path}: got [-a-z]+; input should be ") as caught:
        parse_config(parse_yaml(f"{section}: {{{key}: {text}}}"))

    assert "finite number" in str(caught.value)


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    """People write rates as 20e6; YAML 1.1 would call that text."""
    path = tmp_path / "kvrs.yaml"
    path.write_text(
        "transfer: {link_bytes_per_s: 20e6, probe_interval_s: 1.5E+1, stall_timeout_s: .5e1}"
    )

    transfer = load_config(path).transfer

    assert (transfer.link_bytes_per_s, transfer.probe_interval_s, transfer.stall_timeout_s) == (
        20e6,
        15.0,
        5.0,
    )


def test_faults_have_line_key_and_id(tmp_path: Path) -> None:
    """Also those that only the check of a machine finds: the file is mended where they stand."""
    path = tmp_path / "bad.yaml"
    path.write_text(
        """proxy:
  host: 0.0.0.0
cluster:
  model: /none
  nodes:
  - id: n0
    instances:
    - {id: p0, role: prefill}
    - id: d0
      role: decode
      port: x
      prt: 1
"""
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    path.write_text(path.read_text().replace("port: x", "port: 1").replace("prt: 1", "pp: 1"))

    checked = CliRunner().invoke(app, ["config", "check", str(path)])

    item = "cluster.nodes.0.instances.1 (d0)"
    assert [fault.partition(";")[0] for fault in caught.value.faults] == [
        f"{path}:11: {item}.port: got 'x'",
        f"{path}:12: {item}.prt: unknown key",
    ]
    assert isinstance(checked.exception, ConfigError)
    assert [fault.split(", ")[0] for fault in checked.exception.faults] == [
        f"{path}:2: proxy.host: got '0.0.0.0'",
        f"{path}:4: cluster.model: /none has no config.json; allowed: a Hugging Face directory",
    ]


def test_text_that_yaml_takes_for_something_else_has_a_hint(tmp_path: Path) -> None:
    """`no` is a truth value and 7 a number; quotes make them names."""
    path = tmp_path / "bad.yaml"
    for text, hint in (("no", "truth values: quote it"), ("7", "(quote it)")):
        path.write_text(f"proxy: {{id: {text}}}")
        with pytest.raises(ConfigError, match=re.escape(hint)):
            load_config(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("proxy: {port: 8000}\nproxy: {port: 1}", "the key 'proxy' stands twice"),
        ("slo: " + "[" * 5000, "nested too deeply"),
        ("slo: 3", r"slo: got 3; allowed: a section"),
    ],
)
def test_what_yaml_allows_and_we_do_not_is_named(tmp_path: Path, text: str, reason: str) -> None:
    """A key that stands twice would silently win; a deep document would be a traceback. The file is
    named.
    """
    path = tmp_path / "kvrs.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=rf"kvrs\.yaml(:[12])?: .*{reason}"):
        load_config(path)


@pytest.mark.parametrize(
    "text",
    [
        *("proxy: [1, 2", "proxy: {port: 2026-13-40}", "a: 0b_"),
        *(f"proxy: {{port: !!{value}}}" for value in ("int x", 'int ""', "bool x", "timestamp x")),
        *("a: !!set [x]", "a: !!map [x]"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    """A parser's error is one line with the file's name."""
    path = tmp_path / "broken.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"broken\.yaml(:[0-9]+)?: not valid YAML"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2\n", ":2: not valid YAML: while parsing a flow sequence at line 1, column 4"),
        ("a: 1\nb: c: d\n", ":2: not valid YAML: mapping values are not allowed here"),
        ("a:\n\t- b\n", ":2: not valid YAML: while scanning for the next token found character"),
    ],
)
def test_a_fault_of_yaml_names_the_line_of_its_file(tmp_path: Path, text: str, says: str) -> None:
    """The parser's own name for a text is not shown."""
    path = tmp_path / "broken.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    assert str(caught.value).startswith(f"{path}{says}")
    assert "<unicode string>" not in str(caught.value)


def test_a_number_that_is_refused_has_its_whole_range() -> None:
    """Whatever is wrong with it."""
    for value in (0, 17, "two", 1.5):
        (fault,) = faults_of({"proxy": {"workers": value}})
        assert fault.count("(allowed: at least 1, at most 16)") == 1, fault


def test_a_budget_that_one_body_could_take_up_is_refused() -> None:
    """The longest body leaves half of it to other requests."""
    (fault,) = faults_of({"proxy": {"max_body_bytes": 4096, "body_budget_bytes": 8191}})

    assert fault.startswith("proxy.body_budget_bytes: got 8191; allowed: at least twice ")


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """Secrets come from the environment or a file of mode 0600."""
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o640)

    with pytest.raises(ConfigError, match="allowed: 0600"):
        read_secret(SecuritySettings(secret_file=str(path)), {})
    path.chmod(0o600)

    assert read_secret(SecuritySettings(secret_file=str(path)), {}) == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"KVRS_SECRET": "short"}, "KVRS_SECRET: a secret of 5 bytes; allowed: at least 16"),
        ({"KVRS_SECRET": ""}, f"KVRS_SECRET is empty; {TO_SET}"),
        ({}, f"KVRS_SECRET is not set; {TO_SET}"),
    ],
)
def test_a_missing_or_short_secret_is_refused_by_name(environ: dict[str, str], fault: str) -> None:
    """Nothing starts unauthenticated by accident; the message says what to set."""
    with pytest.raises(ConfigError) as caught:
        read_secret(SecuritySettings(), environ)

    assert caught.value.faults == [f"environment variable {fault}"]


def test_equal_configurations_have_one_digest() -> None:
    """Order and defaults in the file do not matter, each value does."""
    plain = parse_config({"slo": {"abort": True}, "policy": {"name": "rom"}})
    other = parse_config({"policy": {"name": "rom", "slots_max": 32}, "slo": {"abort": True}})
    changed = parse_config({"policy": {"name": "rom", "slots_max": 31}, "slo": {"abort": True}})

    assert config_digest(plain) == config_digest(other) != config_digest(changed)
