"""A page in headless Chromium, driven over its DevTools port."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE_S = 180.0


class Page:
    """The one page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []  # Of the console, and exceptions that nothing caught.
        self._socket = socket
        self._ids = count(1)

    async def call(self, method: str, **params: Any) -> Any:
        """A call of the DevTools protocol, and its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: Any) -> None:
        method, params = message.get("method"), message.get("params", {})
        is_error = (
            method == "Runtime.exceptionThrown"
            or (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"))
            or (method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"))
        )
        if is_error:
            self.errors.append(json.dumps(params))

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; of a promise what it is fulfilled with."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until it is true."""
        async with asyncio.timeout(_PATIENCE_S):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.02)

    async def size(self, width: int, height: int) -> None:
        """In pixels of CSS."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def scheme(self, value: str) -> None:
        """`light` or `dark`, as the user prefers."""
        feature = {"name": "prefers-color-scheme", "value": value}
        await self.call("Emulation.setEmulatedMedia", features=[feature])


@asynccontextmanager
async def browsing(url: str, profile: Path) -> AsyncIterator[Page]:
    """The page at this address, in a browser with a new profile in a directory of its own."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_PATIENCE_S), aiohttp.ClientSession() as http:
            target = await _target(http, profile / "DevToolsActivePort")
            socket = await http.ws_connect(target, max_msg_size=0)
            page = Page(socket)
            for domain in ("Runtime", "Log", "Page"):
                await page.call(f"{domain}.enable")
            await page.call("Page.navigate", url=url)
            yield page
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _target(http: aiohttp.ClientSession, port_file: Path) -> str:
    """Where the page is driven, once the browser has it."""
    while True:
        # The file is empty at first, and the port is not there at once.
        with suppress(OSError, ValueError, aiohttp.ClientError):
            port = int(port_file.read_text().partition("\n")[0])
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                for each in await answer.json(content_type=None):
                    if each["type"] == "page":
                        return str(each["webSocketDebuggerUrl"])
        await asyncio.sleep(0.05)
