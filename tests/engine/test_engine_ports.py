"""An instance that is started by hand: which of its ports it cannot have, and what its starts are
told apart by.
"""

import asyncio
import socket
from pathlib import Path

import pytest

from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_engine.engine.server import serve
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import client_of
from tests.engine.serving import SECRET

pytestmark = [pytest.mark.engine, pytest.mark.network]


@pytest.mark.parametrize("bind", [None, "127.0.0.2"])
@pytest.mark.parametrize("key", ["port", "page_port"])
async def test_a_port_in_use_is_named(tiny_model: Path, key: str, bind: str | None) -> None:
    """Two ports belong to an instance; "address already in use" alone would leave the user
    guessing. With `bind` it is that address that counts.
    """
    with socket.socket() as taken:
        taken.bind((bind or "127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        instance = {"id": "e0", "role": "both", key: port, "bind": bind}
        nodes = [{"id": "n0", "instances": [instance]}]
        config = parse_config({"cluster": {"model": str(tiny_model), "nodes": nodes}})

        with pytest.raises(ConfigError) as caught:
            await serve(config, InstanceId("e0"), 1, SECRET, asyncio.Event(), lambda: None)

    assert caught.value.faults == [
        f"instance e0: {key}: {bind or '127.0.0.1'}:{port} is in use; allowed: a free port"
    ]


async def test_a_new_start_is_above_all_fences_of_the_one_before(tiny_model: Path) -> None:
    """Else pages of a fenced, then restarted instance would be asked for in its next start."""
    ports = free_ports(2)
    nodes = [
        {
            "id": "n0",
            "instances": [{"id": "e0", "role": "both", "port": ports[0], "page_port": ports[1]}],
        }
    ]
    config = parse_config({"cluster": {"model": str(tiny_model), "nodes": nodes}})
    epochs = []
    for start in (1, 2):
        stop, ready = asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(
            serve(config, InstanceId("e0"), start, SECRET, stop, ready.set)
        )
        await asyncio.wait(
            {serving, waiting := asyncio.ensure_future(ready.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert waiting.done()
        key = scoped_key(SECRET, Scope.INSTANCE, "e0")
        async with client_of(f"http://127.0.0.1:{ports[0]}", key) as http:
            for _ in range(2):
                async with http.post("/kvrs/v1/fence", json={"attempts": {}}) as answer:
                    epochs.append((await answer.json())["epoch"])
        stop.set()
        await serving

    assert epochs == sorted(set(epochs))
