"""An instance that is started by hand says which of its ports it cannot have."""

import asyncio
import socket
from pathlib import Path

import pytest

from kvrs.config import parse_config
from kvrs.engine.server import serve
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from tests.engine.serving import SECRET


@pytest.mark.parametrize("key", ["port", "page_port"])
async def test_a_port_in_use_is_named(tiny_model: Path, key: str) -> None:
    """Two ports belong to an instance; "address already in use" alone would leave the user guessing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nodes = [{"id": "n0", "instances": [{"id": "e0", "role": "both", key: port}]}]
        config = parse_config({"cluster": {"model": str(tiny_model), "nodes": nodes}})

        with pytest.raises(ConfigError) as caught:
            await serve(config, InstanceId("e0"), 1, SECRET, asyncio.Event(), lambda: None)

    assert caught.value.faults == [f"instance e0: {key}: 127.0.0.1:{port} is in use; allowed: a free port"]
