"""The configuration read again by a proxy that serves."""

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.config import origin
from kvrs.config.file import Config, config_digest, load_config, parse_config
from kvrs.config.origin import CommandLine
from kvrs.core.event_log import LogEntry, read, rerun
from kvrs.core.model import events as ev
from kvrs.errors import ConfigError
from kvrs.proxy.reload import Apply, ReloadingPart, ReloadResult, Reloads
from kvrs.proxy.server import _reload_when
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from kvrs_testkit.proxy_process import REQUEST, config_of, process_of, until_logged
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.streams.test_proxy_deaths import all_exact, held_open, release

pytestmark = [pytest.mark.process, pytest.mark.network]


class ConfigFile:
    """The file of a proxy, changed in one place after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.system: ProxyCluster | None = None

    def load(self) -> Config:
        return load_config(self.path)

    def change(self, **sections: dict[str, Any]) -> None:
        assert self.system is not None
        document = self.system.proxy._config.model_dump(mode="json")
        for name, values in sections.items():
            document[name] |= values
        self.path.write_bytes(msgspec.json.encode(document))

    async def reload(self) -> tuple[int, Any]:
        assert self.system is not None
        url = f"http://127.0.0.1:{self.system.proxy.admin_port}/kvrs/v1/reload"
        async with self.system.http.post(url) as answer:
            return answer.status, msgspec.json.decode(await answer.read())


Opener = Callable[..., Any]


@pytest.fixture
def opened(build: ProxyClusterBuilder, tmp_path: Path) -> Opener:
    async def make(**settings: Any) -> tuple[ProxyCluster, ConfigFile]:
        file = ConfigFile(tmp_path / "kvrs.yaml")
        file.system = await build(read=file.load, **settings)
        return file.system, file

    return make


async def test_a_reload_changes_decisions_and_loses_no_stream(
    opened: Opener, tmp_path: Path
) -> None:
    """Streams that run are recovered by the new policy, exactly; the log runs again."""
    log = tmp_path / "events"
    system, file = await opened(proxy={"event_log": str(log)})
    asked = await held_open(system, count=4)
    file.change(policy={"name": "always_recompute", "slots_max": 3}, slo={"recovery_gap_s": 5.0})

    status, answer = await file.reload()
    await system.instances["d0"].kill()
    await system.until_health(d0="down")
    release(system)

    assert (status, answer) == (
        200,
        {
            "applied": ["policy.name", "policy.slots_max", "slo.recovery_gap_s"],
            "restart_needed": [],
        },
    )
    assert await all_exact(asked)
    state = await system.state()
    assert {row["option"] for row in state["recoveries"]} == {"recompute"}
    assert state["proxies"][0]["policy"] == "always_recompute"
    await system.proxy.close()
    lines = log.read_text().splitlines()
    reloads = [
        entry.event.policy.name.value
        for entry in read(lines)
        if isinstance(entry, LogEntry) and isinstance(entry.event, ev.SettingsReloaded)
    ]
    assert reloads == ["always_recompute"]
    assert rerun(lines).difference is None


async def test_the_digest_is_that_of_the_configuration_in_use() -> None:
    """Also after a reload."""
    files = [parse_config({"policy": {"name": name}}) for name in ("rom", "auto")]
    reloads = Reloads(files[0], lambda: files[1])
    reloads.add(ReloadingPart("policy", lambda config: lambda: None, ("policy",)))

    before = reloads.describe()["config_digest"]
    await reloads.reload()

    assert [before, reloads.describe()["config_digest"]] == [*map(config_digest, files)]


def test_the_row_of_a_proxy_names_its_launcher() -> None:
    """Faults are for clusters that have one."""
    config = parse_config({})
    launch = origin.UpCommand(7, None, "digest")

    files = [origin.ConfigFile(None, lambda: config, given) for given in (launch, None)]

    assert [Reloads(config, file).describe()["launcher_pid"] for file in files] == [7, None]


async def test_a_reload_without_a_file_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """A file is named only where a copy of it was read."""
    line = CommandLine([], ["http://127.0.0.1:8200"])
    launch = origin.UpCommand(7, None, "digest")

    await Reloads(Config(), origin.ConfigFile(None, Config, command_line=line)).reload()
    await Reloads(Config(), origin.ConfigFile(Path("copy.yaml"), Config, launch)).reload()

    logged = [vars(each) for each in caplog.records if each.levelname == "WARNING"]
    assert [(each["msg"], each.get("file")) for each in logged] == [
        ("no file to reload", None),
        ("reloaded a copy", Path("copy.yaml")),
    ]
    assert [each["note"].partition(" without")[0] for each in logged] == [
        "this proxy was started",
        "this proxy was started by kvrs lab up",
    ]
    assert "file" not in logged[0]


async def test_a_bad_file_changes_nothing_and_every_fault_is_named(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Also not the half of it that is right. A metric says so until a reload succeeds."""
    system, file = await opened()
    before = (await system.state())["proxies"]
    assert await system.count("kvrs_config_last_reload_successful") == 1
    file.path.write_text("policy: {name: rom, slots_max: 0, recovery: {wait: 3}}\nslo: {ttft_s: x}")

    status, answer = await file.reload()

    assert status == 400
    faults = answer["error"]["faults"]
    named = ["policy.slots_max: got 0", "policy.recovery.wait: unknown key", "slo.ttft_s: got 'x'"]
    for fault, name in zip(faults, named, strict=True):
        assert re.match(re.escape(str(file.path)) + r"(:\d+)?: " + re.escape(name), fault), fault
    logged = [record for record in caplog.records if record.message == "not reloaded"]
    assert [record.__dict__["cause"] for record in logged] == faults
    (after,) = (await system.state())["proxies"]
    assert [after | {"last_reload_succeeded": True}] == before
    assert await system.count("kvrs_config_last_reload_successful") == 0
    file.change()
    assert (await file.reload())[0] == 200
    assert await system.count("kvrs_config_last_reload_successful") == 1


async def test_what_cannot_be_reloaded_is_named(opened: Opener) -> None:
    """It takes effect at a restart; the rest of the file takes effect now."""
    system, file = await opened()
    file.change(
        policy={"name": "rom"}, proxy={"max_streams": 7, "port": 1}, transfer={"lease_s": 9.0}
    )

    status, answer = await file.reload()

    assert status == 200
    assert answer == {
        "applied": ["policy.name"],
        "restart_needed": ["proxy.port", "proxy.max_streams", "transfer.lease_s"],
    }
    assert (await system.state())["proxies"][0]["policy"] == "rom"


async def test_a_fault_of_one_part_keeps_all_from_changing(opened: Opener) -> None:
    """Keys and certificates are files of their own: a reload is all or nothing."""
    system, file = await opened()
    applied: list[str] = []

    def good(config: Config) -> Apply:
        return lambda: applied.append(config.policy.name.value)

    def bad(config: Config) -> Apply:
        if config.policy.slots_max == 3:
            raise ConfigError(["keys.txt: no such file"])
        return lambda: applied.append("bad")

    system.proxy.reloads.add(ReloadingPart("certificates", good))
    system.proxy.reloads.add(ReloadingPart("keys", bad))
    file.change(policy={"name": "rom", "slots_max": 3})

    refused = await file.reload()
    policy = (await system.state())["proxies"][0]["policy"]
    file.change(policy={"name": "rom"})
    taken = await file.reload()

    assert refused[0] == 400
    assert refused[1]["error"]["faults"] == ["keys.txt: no such file"]
    assert policy == "auto"
    assert taken == (
        200,
        {"applied": ["policy.name", "certificates", "keys"], "restart_needed": []},
    )
    assert applied == ["rom", "bad"]


async def test_a_proxy_reloads_on_sighup(build: ProxyClusterBuilder, tmp_path: Path) -> None:
    """SIGHUP works as in other daemons; a bad file is logged by path, and the streams run on."""
    system = await build()
    gate = system.script.gate = asyncio.Event()
    system.script.gate_at = 2
    path = config_of(system, tmp_path)
    text = path.read_bytes()
    async with process_of(path) as (proxy, url), aiohttp.ClientSession() as http:
        streamed = await http.post(url, json=REQUEST | {"stream": True})
        await streamed.content.readuntil(b"\n\n")

        path.write_bytes(text.replace(b"{", b'{"policy": {"slots_max": 0}, ', 1))
        proxy.send_signal(signal.SIGHUP)
        refused = await until_logged(proxy, b"not reloaded")
        path.write_bytes(text.replace(b"{", b'{"policy": {"slots_max": 2}, ', 1))
        proxy.send_signal(signal.SIGHUP)
        taken = await until_logged(proxy, b" reloaded applied")
        gate.set()
        events = await streamed.read()

    assert b"policy.slots_max: got 0" in refused
    assert b"policy.slots_max" in taken
    assert events.endswith(b"data: [DONE]\n\n")
    assert b"error" not in events


async def test_a_bug_in_one_reload_does_not_keep_the_next_from_being_carried_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker would decide by the old policy from then on, and log no cause."""
    asked, again = asyncio.Event(), asyncio.Event()

    class Failing:
        failures = 0

        async def reload(self) -> ReloadResult:
            if not self.failures:
                self.failures += 1
                raise RuntimeError("dictionary changed size during iteration")
            again.set()
            return ReloadResult([], [])

    service = Failing()
    reloading = asyncio.create_task(_reload_when(asked, service))  # type: ignore[arg-type]
    async with asyncio.timeout(WITHIN_S):
        while not again.is_set():
            asked.set()
            await asyncio.sleep(0.001)
    reloading.cancel()

    assert [record.message for record in caplog.records] == ["not reloaded because of a bug"]
    assert "dictionary changed size" in caplog.text
