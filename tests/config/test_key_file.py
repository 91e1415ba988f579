from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.config.security import SecuritySettings, key_hash, read_tenants
from kvrs.errors import ConfigError

HASH = "ab" * 32


def read(path: Path, text: str, mode: int = 0o600) -> object:
    path.write_text(text)
    path.chmod(mode)
    return read_tenants(SecuritySettings(key_file=str(path)), {})


def test_without_keys_there_are_no_tenants() -> None:
    assert read_tenants(SecuritySettings(), {}) is None


def test_the_environment_may_hold_them() -> None:
    tenants = read_tenants(SecuritySettings(), {"KVRS_KEYS": f"a: {{keys: [{HASH}], streams: 2}}"})

    assert tenants is not None
    assert tenants["a"].streams == 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no tenant"),
        ("[]", "no tenant"),
        ("a: {", "not valid YAML"),
        ("a: 1", "a: got 1; allowed: a section"),
        ("a: {keys: []}", "a.keys"),
        ("a: {keys: [abc]}", "a.keys.0: got 3 characters; allowed: the SHA-256 of a key, 64 "),
        ("a: {keys: 7}", "a.keys: got 7; allowed: a list"),
        (f"a: {{keys: [{HASH}], streams: 0}}", "a.streams: got 0"),
        (f"a: {{keys: [{HASH}], stream: 1}}", "a.stream: unknown key; allowed: enabled, keys"),
        (f"a b: {{keys: [{HASH}]}}", "as a tenant's name"),
        (f"a: {{keys: [{HASH}]}}\nb: {{keys: [{HASH}]}}", "one key is of a too"),
    ],
)
def test_a_fault_is_named_by_its_path(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.key_file") as raised:
        read(tmp_path / "keys", text)

    assert fault in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "a: {keys: [sk-mine]}",
        "a: {keys: sk-mine}",
        "a: sk-mine",
        "sk-mine",
        "a: {keys: [sk-mine}",
        "a: *sk-mine",
    ],
)
def test_a_fault_shows_no_key(tmp_path: Path, text: str) -> None:
    """A key may stand where its hash belongs, and errors go to logs."""
    with pytest.raises(ConfigError) as raised:
        read(tmp_path / "keys", text)

    assert "sk-mine" not in str(raised.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: 0600"):
        read(tmp_path / "keys", f"a: {{keys: [{HASH}]}}", 0o640)


@pytest.mark.parametrize("name", ["alice", "7", "null", "2026-01-02", "1e5", "-", "on", "0x1F"])
def test_the_command_makes_a_key_and_its_line(name: str) -> None:
    """The line alone is stored, and no key can be told from it. YAML has some names as numbers."""
    result = CliRunner().invoke(app, ["key", "--", name])
    key, line = result.stdout.splitlines()

    tenants = read_tenants(SecuritySettings(), {"KVRS_KEYS": line})

    assert tenants is not None
    assert tenants[name].keys == [key_hash(key.encode()).hex()]
    assert len(key) > 40
    assert key not in line


@pytest.mark.parametrize("name", ["", "a b", "a: {}", "a\nb"])
def test_no_key_is_made_for_a_name_that_the_file_cannot_have(name: str) -> None:
    """The line would be refused later, when the key is with the client already."""
    result = CliRunner().invoke(app, ["key", name])

    assert isinstance(result.exception, ConfigError)
    assert "as a tenant's name; allowed: " in str(result.exception)
    assert result.stdout == ""
