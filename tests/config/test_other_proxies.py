"""`kvrs config check` of the files of several proxies: what each says of the others."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from kvrs.cli import app
from kvrs.config.file import parse_config
from kvrs.errors import ConfigError


def check(folder: Path, *proxies: dict[str, Any]) -> Result:
    files = []
    for number, proxy in enumerate(proxies):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump({"proxy": proxy}))
    return CliRunner().invoke(app, ["config", "check", *map(str, files)])


def proxy(name: str, port: int, *peers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"id": name, "peer_port": port, "peers": [*peers], **changes}


def test_files_that_agree_are_valid(tmp_path: Path) -> None:
    first = proxy("a", 9000, {"id": "b", "peer_port": 9010, "workers": 2})
    second = proxy("b", 9010, {"id": "a", "peer_port": 9000, "workers": 1}, workers=2)

    result = check(tmp_path, first, second)

    assert result.exit_code == 0, result.output
    assert result.output.replace("\n", "").count("is valid") == 2


@pytest.mark.parametrize(
    ("peer", "fault"),
    [
        ({"peer_port": 9010}, ".0 (b).workers: got 1; allowed: 4, proxy.workers in {other}"),
        (
            {"peer_port": 9010, "workers": 2},
            ".0 (b).workers: got 2; allowed: 4, proxy.workers in {other}",
        ),
        (
            {"peer_port": 9011, "workers": 4},
            ".0 (b).peer_port: got 9011; allowed: 9010, proxy.peer_port in {other}",
        ),
        ({"id": "c", "peer_port": 9010}, ": lacks 'b', the proxy of {other}; allowed: all others"),
    ],
)
def test_an_entry_that_is_not_what_the_other_file_says_is_a_fault(
    tmp_path: Path, peer: dict[str, Any], fault: str
) -> None:
    """Each file alone is valid, and streams could not be resumed there."""
    first = proxy("a", 9000, {"id": "b", **peer})
    second = proxy("b", 9010, {"id": "a", "peer_port": 9000, "workers": 1}, workers=4)

    result = check(tmp_path, first, second)

    assert isinstance(result.exception, ConfigError), result.output
    (found,) = result.exception.faults
    assert found.startswith(f"{tmp_path / '0.yaml'}:")
    assert found.endswith(f" proxy.peers{fault.format(other=tmp_path / '1.yaml')}")


def test_two_files_of_one_id_are_a_fault(tmp_path: Path) -> None:
    result = check(tmp_path, proxy("a", 9000), proxy("a", 9010))

    assert isinstance(result.exception, ConfigError)
    assert len(result.exception.faults) == 2
    assert "proxy.id: got 'a', as in " in result.exception.faults[0]


def test_faults_of_all_files_are_shown_at_once(tmp_path: Path) -> None:
    """One that cannot be read is compared with none."""
    first, second = proxy("a", 9000, {"id": "b", "peer_port": 9010}), proxy("b", 9010)

    result = check(tmp_path, first, second, {"id": "c", "worker": 2})

    assert isinstance(result.exception, ConfigError)
    assert [fault.partition(": ")[2][:24] for fault in result.exception.faults] == [
        "proxy.worker: unknown ke",
        "proxy.peers: lacks 'a', ",
    ]


def test_one_list_of_peers_serves_all_proxies(tmp_path: Path) -> None:
    """A proxy leaves its own entry out."""
    peers = [{"id": "a", "peer_port": 9000}, {"id": "b", "peer_port": 9010}]

    result = check(tmp_path, proxy("a", 9000, *peers), proxy("b", 9010, *peers))

    assert result.exit_code == 0, result.output


def test_an_own_entry_that_says_something_else_is_refused() -> None:
    """It may be meant for another proxy."""
    section = {"id": "a", "peer_port": 9000, "peers": [{"id": "a", "peer_port": 9010}]}

    with pytest.raises(ConfigError, match="'a' is this proxy, with peer_port 9000 and workers 1"):
        parse_config({"proxy": section})
