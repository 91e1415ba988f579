"""The operator's side of a kvrs cluster under test: its state, its recoveries, and what only an instance itself can do."""

import asyncio
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kvrs.errors import KvrsError
from kvrs.protocol.faults import FaultRequest
from kvrs.protocol.secrets import http_token

_TIMEOUT_S = 10.0
_SHOWN_BYTES = 200


class AdminError(KvrsError):
    """The admin port, or an instance, did not do what was asked; the message names the URL."""


class AdminPort:
    """An async context manager. Without the secret it can look, but ask nothing of the instances."""

    def __init__(self, url: str, secret: bytes | None) -> None:
        self.url = url.rstrip("/")
        self.secret = secret

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def state(self) -> Any:
        """`/kvrs/v1/state`.

        Raises:
            AdminError: nobody answers there, or no kvrs proxy.
        """
        url = f"{self.url}/kvrs/v1/state"
        try:
            async with self._session.get(url) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AdminError(f"{url}: {error or type(error).__name__}") from None
        try:
            state = msgspec.json.decode(body)
            state["instances"], state["streams"], state["recoveries"]
        except (msgspec.DecodeError, TypeError, KeyError):
            raise AdminError(f"{url}: not the state of a kvrs proxy; it begins {body[:_SHOWN_BYTES]!r}") from None
        return state

    async def wait_all_up(self, timeout_s: float, look_again_s: float) -> None:
        """Wait until every instance is up, and every agent.

        Raises:
            AdminError: after `timeout_s` some are not; says which.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while down := _down(await self.state()):
                    await asyncio.sleep(look_again_s)
        except TimeoutError:
            raise AdminError(f"{self.url}: not up after {timeout_s:.0f} s: {', '.join(down)}") from None

    async def reset_caches(self) -> bool:
        """Empty every instance's prefix cache, so that each run starts cold; False when there is no secret to do it with."""
        if self.secret is None:
            return False
        for row in (await self.state())["instances"]:
            if row["health"] == "up":
                await self._post(f"{row['url']}/reset_prefix_cache", b"")
        return True

    async def inject(self, instance_url: str, fault: FaultRequest) -> None:
        """Have an instance carry out a fault of its own sending side."""
        await self._post(f"{instance_url}/kvrs/v1/faults", msgspec.json.encode(fault))

    async def _post(self, url: str, body: bytes) -> None:
        if self.secret is None:
            raise AdminError(f"{url}: needs the cluster's secret; allowed: --secret-file, or the environment's KVRS_SECRET")
        headers = {"Authorization": f"Bearer {http_token(self.secret)}"}
        try:
            async with self._session.post(url, data=body, headers=headers) as answer:
                if answer.status != 200:
                    shown = (await answer.content.read(_SHOWN_BYTES)).decode(errors="replace")
                    raise AdminError(f"{url}: HTTP {answer.status}: {shown}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AdminError(f"{url}: {error or type(error).__name__}") from None


def _down(state: Any) -> list[str]:
    return [row["id"] for row in [*state["instances"], *state.get("agents", ())] if row["health"] != "up"]
