"""Which users may connect to the row port of a node's agent: servers need not run as its user."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvrs.errors import ConfigError
from kvrs.protocol.rows import Space
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.connections import dial_first, dial_unix, listen_unix, remove_unix
from kvrs.transfer.rows.tags import RowTags
from kvrs.transfer.store.directory import row_directory, store_directory
from kvrs_testkit.row_agent import until
from kvrs_testkit.row_engine import key_of, row_of
from tests.agent.agents import N0, SECRET, AgentProcess, document, processes

AGENT, SERVER, SHARED = "12001", "12002", "12000"
SPACE = Space(bytes(31) + b"u", 4096)
ROWS = 4
KEYS = [key_of(number) for number in range(1, 998)]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start other users' processes")


@pytest.fixture
def base() -> Iterator[Path]:
    """`backup.directory` of an agent that other users reach: those of pytest are closed."""
    base = Path(tempfile.mkdtemp(prefix="kvrs-users-"))
    yield base
    shutil.rmtree(base)


def given_to(base: Path, group: str) -> Path:
    os.chown(base, int(AGENT), int(group))
    base.chmod(0o755)
    return row_directory(str(base), SECRET, N0)


def agent_of(base: Path, *groups: str) -> AgentProcess:
    agent = AgentProcess(base, document(base), user=[AGENT, ",".join([AGENT, *groups])])
    for path in base.glob("*.yaml"):
        path.chmod(0o644)
    return agent


@contextmanager
def engine_of(directory: Path, *groups: str) -> Iterator[subprocess.Popen[str]]:
    user = [SERVER, ",".join([SERVER, *groups])]
    rows = [SECRET.hex(), SPACE.namespace.hex(), str(ROWS), str(SPACE.row_bytes)]
    program = ["kvrs_testkit.row_engine", str(directory), *rows, "agent-n0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrs_testkit.as_user", *user, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def client_of(directory: Path) -> RowClient:
    key = scoped_key(SECRET, Scope.ROWS, "agent-n0")
    dial = partial(dial_unix, directory)
    return RowClient("agent-n0", dial, key, SPACE, RowTags([SECRET]), is_local=True)


def loaded(client: RowClient) -> int:
    """Count the rows that an agent serves; none of them is another one."""
    held = [key for key, is_held in zip(KEYS, client.find(KEYS, 5.0), strict=True) if is_held]
    count = 0
    for key in held:
        row = bytearray(SPACE.row_bytes)
        if client.load([(key, memoryview(row))], 5.0):
            assert row == row_of(key, SPACE.row_bytes)
            count += 1
    return count


@as_root
@pytest.mark.process
@pytest.mark.network
@pytest.mark.parametrize(
    ("given", "agents", "servers", "used"),
    [
        (SHARED, [SHARED], [SHARED], SHARED),
        # The agent is in no such group: its own takes the place.
        (SHARED, [], [AGENT], AGENT),
        ("0", [SHARED], [AGENT], AGENT),
    ],
)
def test_a_group_lets_servers_of_another_user_pass_their_memory(
    base: Path, given: str, agents: list[str], servers: list[str], used: str
) -> None:
    """It is served while the server lives and after its death. The store is no part of that."""
    directory, store = given_to(base, given), store_directory(str(base), SECRET, N0)
    agent = agent_of(base, *agents)
    with processes(agent), engine_of(directory, *servers) as engine:
        client = client_of(directory)
        until(lambda: loaded(client) > 0)
        found = [each.stat() for each in (directory, directory / "rows", store)]
        engine.kill()
        engine.wait()
        assert agent.process is not None
        assert agent.process.stderr is not None
        assert any("engine died" in line for line in agent.process.stderr)
        assert loaded(client) >= ROWS - 1  # One was being written.
        client.close()

        status, output = agent.end(signal.SIGTERM)

    assert [stat.S_IMODE(each.st_mode) for each in found] == [0o750, 0o660, 0o700]
    assert [each.st_gid for each in found[:2]] == [int(used)] * 2
    assert {each.st_uid for each in found} == {int(AGENT)}
    assert status == 0, output
    assert [path.suffix for path in base.iterdir()] == [".yaml"]


@as_root
@pytest.mark.process
@pytest.mark.network
@pytest.mark.parametrize("servers", [[], [SHARED]])
def test_a_server_outside_of_the_group_reaches_no_agent(base: Path, servers: list[str]) -> None:
    """Its log names the directory."""
    directory = given_to(base, "0")
    with processes(agent_of(base)), engine_of(directory, *servers) as engine:
        assert engine.stderr is not None
        said = engine.stderr.readline()
        client = client_of(directory)
        served = loaded(client)
        client.close()

    assert served == 0
    assert said.startswith("no agent holds the KV of this engine: ")
    assert "Permission denied" in said
    assert str(directory) in said


@pytest.mark.process
@pytest.mark.network
@pytest.mark.parametrize("mode", [0o770, 0o752, 0o755])
def test_an_agent_does_not_start_in_a_directory_that_others_may_use(
    tmp_path: Path, mode: int
) -> None:
    directory = row_directory(str(tmp_path), SECRET, N0)
    directory.mkdir()
    directory.chmod(mode)
    agent = AgentProcess(tmp_path, document(tmp_path))

    with pytest.raises(AssertionError) as caught:
        agent.start()

    said = f"backup.directory: {directory}: others may use it (mode bits {mode & 0o027:03o}); "
    assert said + "allowed: a directory of this user, mode 0750" in str(caught.value)
    assert "Traceback" not in str(caught.value)


@as_root
def test_an_agent_does_not_listen_in_a_directory_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir(0o750)
    os.chown(tmp_path / "rows", int(SERVER), 0)

    with pytest.raises(ConfigError, match=f"belongs to user {SERVER}"):
        listen_unix(tmp_path / "rows")

    assert list((tmp_path / "rows").iterdir()) == []


@pytest.mark.network
@pytest.mark.parametrize("mode", [0o770, 0o752, 0o755])
def test_a_server_does_not_connect_in_a_directory_that_others_may_use(
    tmp_path: Path, mode: int
) -> None:
    """Another socket may have been put there."""
    directory = tmp_path / ("d" * 120)
    with listen_unix(directory):
        dial_unix(directory, 5.0).close()
        directory.chmod(mode)
        with pytest.raises(PermissionError, match=f"{directory}: others may use it"):
            dial_unix(directory, 5.0)


@pytest.mark.network
def test_the_directory_is_not_reached_over_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with listen_unix(tmp_path / "real"), pytest.raises(OSError, match="Not a directory"):
        dial_unix(tmp_path / "link", 5.0)
    with pytest.raises(ConfigError, match="Not a directory"):
        listen_unix(tmp_path / "link")

    remove_unix(tmp_path / "link")

    assert (tmp_path / "real" / "rows").is_socket()


def test_an_agent_is_found_by_any_secret_while_these_are_rotated(tmp_path: Path) -> None:
    """The one in use names its directory, and a server may still have another first one."""
    secrets = (b"the next secret, long enough", SECRET)
    directories = [row_directory(str(tmp_path), secret, N0) for secret in secrets]
    with listen_unix(directories[1]) as listener:
        for order in (directories, [*reversed(directories)]):
            with dial_first(order, 5.0), listener.accept()[0]:
                pass
    remove_unix(directories[1])
    with pytest.raises(FileNotFoundError):
        dial_first(directories, 5.0)
