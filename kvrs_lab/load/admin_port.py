"""The laboratory's access to a cluster: a proxy's state, and orders to instances and agents."""

import asyncio
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kvrs.net.admin import AdminClient, AdminError
from kvrs.net.proving import Address, ProvingConnector, UnprovenError, address_of
from kvrs.net.tls import Certificates
from kvrs.protocol.instance import FaultRequest
from kvrs.protocol.secrets import Scope, ScopedKey, scoped_key

_TIMEOUT_S = 10.0
_SHOWN_BYTES = 200


class AdminPort:
    """Asynchronous client of an admin port, which also sends orders to the instances and agents of
    its state. An async context manager. A client without the cluster's secret only reads; `tls` is
    for the cluster's `security.tls`.
    """

    def __init__(
        self, client: AdminClient, secret: bytes | None = None, tls: Certificates | None = None
    ) -> None:
        self.client = client
        self.secret = secret
        self._tls = tls
        # Keys of the named instances and agents, by address.
        self._keys: dict[Address, ScopedKey] = {}

    async def __aenter__(self) -> Self:
        self._to_members = aiohttp.ClientSession(
            connector=ProvingConnector(self._keys, self._tls),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._to_members.close()

    async def state(self) -> Any:
        """Read `/kvrs/v1/state`.

        Raises:
            AdminError: no answer, or not from a kvrs proxy.
        """
        return await asyncio.to_thread(self.client.state)

    async def losses(self) -> list[dict[str, Any]]:
        """Read the latest losses of instances and agents, oldest first: their names, and the Unix
        times at which the proxy noticed them.

        Raises:
            AdminError: as `state`.
        """
        overview = await asyncio.to_thread(self.client.overview)
        return [
            {"instance": row["subject"], "at_s": row["at_s"]}
            for row in reversed(overview["incidents"])
            if row.get("is_loss")  # A proxy of an older version names none.
        ]

    async def wait_all_up(
        self, timeout_s: float, look_again_s: float, *, tested: bool = False
    ) -> None:
        """Wait until every instance and agent is up; with `tested`, also until all self-tests are
        done, which send requests and KV.

        Raises:
            AdminError: the time is over; the message names the processes that are not up.
        """
        down: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                while down := _down(state := await self.state()) or _in_tests(state, tested):
                    await asyncio.sleep(look_again_s)
        except TimeoutError:
            how = "up and tested" if tested else "up"
            cause = f"not {how} after {timeout_s:.0f} s: {', '.join(down)}"
            raise AdminError(self.client.url, cause) from None

    async def reset_caches(self) -> bool:
        """Empty all prefix caches for a cold start; return False without the secret."""
        if self.secret is None:
            return False
        for row in (await self.state())["instances"]:
            if row["health"] == "up":
                await self._post(row["id"], row["url"], "/reset_prefix_cache", b"")
        return True

    async def inject(self, name: str, url: str, fault: FaultRequest) -> None:
        """Inject a fault at the named instance or agent."""
        await self._post(name, url, "/kvrs/v1/faults", msgspec.json.encode(fault))

    async def _post(self, name: str, base: str, path: str, body: bytes) -> None:
        url = base + path
        if self.secret is None:
            raise AdminError(
                url,
                "needs the cluster's secret",
                "--config, or the environment's KVRS_SECRET",
            )
        self._keys[address_of(base)] = scoped_key(self.secret, Scope.ADMIN, name)
        try:
            async with self._to_members.post(url, data=body) as answer:
                if answer.status != 200:
                    shown = (await answer.content.read(_SHOWN_BYTES)).decode(errors="replace")
                    raise AdminError(url, f"HTTP {answer.status}: {shown}", status=answer.status)
        except UnprovenError as error:
            cause = f"it did not prove that it is {name!r}: {error.cause}"
            raise AdminError(url, cause) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AdminError(url, str(error) or type(error).__name__) from None


def _down(state: Any) -> list[str]:
    return [
        row["id"]
        for row in [*state["instances"], *state.get("agents", ())]
        if row["health"] != "up"
    ]


def _in_tests(state: Any, tested: bool) -> list[str]:
    """Instances with an unfinished self-test, if `tested`. `self_test` is null at a proxy without
    self-tests.
    """
    tests = {row["id"]: row["self_test"] for row in state["instances"]} if tested else {}
    return [name for name, test in tests.items() if test is not None and not test["done"]]
