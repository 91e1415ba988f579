"""The route by which an experiment has an instance damage what it sends."""

from collections.abc import Callable

import aiohttp
import pytest

from kvrs.config.file import parse_config
from kvrs.ids import NodeId
from kvrs.net.routes import Routes
from kvrs.transfer.fault_route import add_fault_route
from kvrs.transfer.limiter import SendingFaults
from kvrs_testkit.ports import serving

pytestmark = pytest.mark.network

N1 = NodeId("n1")


async def ask(
    faults: SendingFaults, body: str, lost: Callable[[int | None], None] | None = None
) -> tuple[int, str]:
    """The status, and of an error its message."""
    routes = Routes()
    add_fault_route(routes, faults, {NodeId("n0"), N1}, lost)
    async with (
        serving(routes) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/kvrs/v1/faults", data=body) as answer,
    ):
        said = await answer.json()
        return answer.status, said.get("error", {}).get("message", "")


async def test_faults_reach_the_sending_side_and_end_when_that_is_asked() -> None:
    """A cut, damaged pages, and none of it."""
    faults, page = SendingFaults(), memoryview(bytearray(8))

    assert (await ask(faults, '{"type":"link","node":"n1","bytes_per_s":0,"for_s":60}'))[0] == 200
    assert (await ask(faults, '{"type":"pages","pages":2}'))[0] == 200
    assert faults.rate(N1, None, now_s=0.0).bytes_per_s == 0
    assert bytes(faults.payload(page)) != bytes(page)
    assert (await ask(faults, '{"type":"none"}'))[0] == 200
    assert faults.rate(N1, None, now_s=0.0).bytes_per_s is None
    assert bytes(faults.payload(page)) == bytes(page)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            '{"type":"link","node":"n9","bytes_per_s":0,"for_s":60}',
            "node: got 'n9'; allowed: n0, n1",
        ),
        ('{"type":"link","node":"n1","bytes_per_s":-1,"for_s":60}', ">= 0"),
        ('{"type":"pages","pages":0}', ">= 1"),
        ('{"type":"melt"}', "Invalid value 'melt'"),
        ("{", "truncated"),
    ],
)
async def test_a_wrong_request_is_refused_and_changes_nothing(body: str, reason: str) -> None:
    """With the value and what is allowed."""
    faults = SendingFaults()

    status, text = await ask(faults, body)

    assert status == 400
    assert reason in text
    assert faults.rate(N1, None, now_s=0.0).bytes_per_s is None


def test_no_configuration_allows_faults_by_itself() -> None:
    """The route does not exist unless the configuration allows faults."""
    assert not parse_config({}).cluster.allow_faults


async def test_a_device_is_lost_only_where_there_is_one() -> None:
    """An agent has none."""
    lost: list[int | None] = []

    assert (await ask(SendingFaults(), '{"type":"device","rank":2}', lost.append))[0] == 200
    refused = await ask(SendingFaults(), '{"type":"device","rank":2}')

    assert lost == [2]
    assert refused == (400, "no device here; allowed: an instance of the embedded engine")
