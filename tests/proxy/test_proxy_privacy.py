"""A proxy writes down nothing that its clients ask or are told, and none of their keys."""

import re
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvrs.config.security import key_hash
from kvrs_testkit.proxy_process import config_of, process_of
from kvrs_testkit.scripted import Fault
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = [pytest.mark.process, pytest.mark.network]

KEY = "key-of-a-client-7f3a"
PROMPT = [48_611, 48_612, 48_613, 48_614]
TEXT = "a sentence that no log may hold"


async def test_logs_hold_no_prompt_no_output_and_no_key(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Neither the log, the event log, the state nor the metrics; through a failure, a refusal and a
    wrong key.
    """
    system = await build()
    system.script.faults[2] = Fault.RESET
    keys, events = tmp_path / "keys", tmp_path / "events.jsonl"
    keys.write_bytes(msgspec.json.encode({"a": {"keys": [key_hash(KEY.encode()).hex()]}}))
    keys.chmod(0o600)
    config = config_of(system, tmp_path)
    document = msgspec.json.decode(config.read_bytes())
    document["proxy"] |= {"event_log": str(events), "self_test": False}
    document["logs"] = {"level": "debug", "access": True}
    document["security"] = {"key_file": str(keys)}
    config.write_bytes(msgspec.json.encode(document))
    headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": "order-7f3a"}
    asked = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    async with process_of(config) as (proxy, url), aiohttp.ClientSession() as http:
        answer = await http.post(url, json=asked, headers=headers)
        assert (answer.status, b"[DONE]" in await answer.read()) == (200, True)
        texts = re.findall(r'"text":"([^"]+)"', (await answer.read()).decode())
        for body, more in (
            (chat, {}),
            (asked | {"user": TEXT, "no_such_field": TEXT}, {}),
            (asked, {"Authorization": f"Bearer wrong-{KEY}"}),
        ):
            path = url.replace("completions", "chat/completions") if body is chat else url
            await (await http.post(path, json=body, headers=headers | more)).read()
        proxy.terminate()
        _, log = await proxy.communicate()

    for line in (b" attempt failed ", b" recovery ", b" kvrs.access request "):
        assert line in log
    assert events.stat().st_size > 0
    written = log.decode() + events.read_text()
    for private in (KEY, "order-7f3a", TEXT):
        assert private not in written
    # As numbers of their own: the digits of a moment may have any of them.
    assert not {*map(str, PROMPT)} & {*re.findall(r"[\w.]+", written)}
    assert "".join(texts)
    assert "".join(texts) not in written
