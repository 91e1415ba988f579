"""The admin port of a kvrs cluster under test: state, recoveries, and orders that only instances
can carry out.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kvrs.errors import KvrsError
from kvrs.faults.orders import FaultRequest
from kvrs.protocol.secrets import Door, DoorKey, door_key
from kvrs.proving import Address, ProvingConnector, UnprovenError, address_of
from kvrs.tls import Certificates

_TIMEOUT_S = 10.0
_SHOWN_BYTES = 200


class AdminError(KvrsError):
    """The admin port, or an instance, did not answer as expected; the message names the URL."""


class AdminPort:
    """An async context manager. Without the secret it reads the state only; `token` is that of
    the admin port, if it asks for one, `tls` of the cluster's `security.tls`.
    """

    def __init__(
        self,
        url: str,
        secret: bytes | None,
        token: bytes | None = None,
        tls: Certificates | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.secret = secret
        self._tls = tls
        self._headers = {} if token is None else {"Authorization": f"Bearer {token.decode()}"}
        self._keys: dict[Address, DoorKey] = {}  # Of the instances and agents that were named.

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout)
        self._to_members = aiohttp.ClientSession(
            connector=ProvingConnector(self._keys, self._tls), timeout=timeout
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()
        await self._to_members.close()

    async def state(self) -> Any:
        """`/kvrs/v1/state`.

        Raises:
            AdminError: there is no answer, or not from a kvrs proxy.
        """
        return await self._get("state", ("instances", "streams", "recoveries"))

    async def overview(self) -> Any:
        """`/kvrs/v1/overview`.

        Raises:
            AdminError: as `state`.
        """
        return await self._get("overview", ("instances", "streams", "recoveries", "policy"))

    async def _get(self, what: str, keys: Sequence[str]) -> Any:
        url = f"{self.url}/kvrs/v1/{what}"
        try:
            async with self._session.get(url, headers=self._headers) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AdminError(f"{url}: {error or type(error).__name__}") from None
        try:
            state = msgspec.json.decode(body)
            for key in keys:
                state[key]
        except (msgspec.DecodeError, TypeError, KeyError):
            raise AdminError(
                f"{url}: not the {what} of a kvrs proxy; it begins {body[:_SHOWN_BYTES]!r}"
            ) from None
        return state

    async def wait_all_up(self, timeout_s: float, look_again_s: float) -> None:
        """Wait until every instance is up, and every agent.

        Raises:
            AdminError: after `timeout_s` some are not; the message names them.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while down := _down(await self.state()):
                    await asyncio.sleep(look_again_s)
        except TimeoutError:
            raise AdminError(
                f"{self.url}: not up after {timeout_s:.0f} s: {', '.join(down)}"
            ) from None

    async def reset_caches(self) -> bool:
        """Empty every instance's prefix cache, so that each run starts cold; False without the
        secret.
        """
        if self.secret is None:
            return False
        for row in (await self.state())["instances"]:
            if row["health"] == "up":
                await self._post(row["id"], row["url"], "/reset_prefix_cache", b"")
        return True

    async def inject(self, name: str, url: str, fault: FaultRequest) -> None:
        """Have the instance or agent of this name carry out a fault of its own sending side."""
        await self._post(name, url, "/kvrs/v1/faults", msgspec.json.encode(fault))

    async def _post(self, name: str, base: str, path: str, body: bytes) -> None:
        url = base + path
        if self.secret is None:
            raise AdminError(
                f"{url}: needs the cluster's secret; allowed: --secret-file, or the "
                f"environment's KVRS_SECRET"
            )
        self._keys[address_of(base)] = door_key(self.secret, Door.ADMIN, name)
        try:
            async with self._to_members.post(url, data=body) as answer:
                if answer.status != 200:
                    shown = (await answer.content.read(_SHOWN_BYTES)).decode(errors="replace")
                    raise AdminError(f"{url}: HTTP {answer.status}: {shown}")
        except UnprovenError as error:
            raise AdminError(
                f"{url}: it did not prove that it is {name!r}: {error.cause}"
            ) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AdminError(f"{url}: {error or type(error).__name__}") from None


def _down(state: Any) -> list[str]:
    return [
        row["id"]
        for row in [*state["instances"], *state.get("agents", ())]
        if row["health"] != "up"
    ]
