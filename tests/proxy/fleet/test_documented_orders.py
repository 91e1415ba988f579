"""docs/operating.md: the orders to a proxy work as they stand there."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from tests.free_ports import free_ports
from tests.proxy.proxy_cluster import open_proxy_cluster

PAGE = Path(__file__).parents[3] / "docs" / "operating.md"
# An order and its continued lines.
_ORDER = re.compile(r"^    (curl (?:.*\\\n)*.*)$", re.MULTILINE)

pytestmark = [
    pytest.mark.network,
    pytest.mark.process,
    pytest.mark.skipif(not shutil.which("curl"), reason="not installed: curl"),
]


async def status_of(order: str, admin_port: int) -> int:
    """The HTTP status of the answer to an order of the page, at this admin port."""
    (port,) = free_ports(1)  # Where nothing listens.
    script = order.replace("127.0.0.1:8001", f"127.0.0.1:{admin_port}")
    script = script.replace("10.0.0.7", "127.0.0.1").replace("8100", str(port))
    script = script.replace("curl", "curl -sS -o /dev/null -w '%{http_code}'", 1)
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-euc", script), stdout=asyncio.subprocess.PIPE
    )
    shown, _ = await shell.communicate()
    assert shell.returncode == 0, script
    return int(shown)


async def test_the_orders_of_the_page_are_obeyed() -> None:
    """In their order, at a cluster with the instances that they name. Those about ranks come first:
    none has several, which the answer says.
    """
    orders = sorted(_ORDER.findall(PAGE.read_text()), key=lambda order: "/leave/" not in order)

    async with open_proxy_cluster(pairs=2) as system:
        statuses = [await status_of(each, system.proxy.admin_port) for each in orders]

    # The start that the page reports the end of was not up here.
    are_refused = ["/leave/" in each or "/exits/" in each for each in orders]
    assert statuses == [409 if is_refused else 200 for is_refused in are_refused]
    assert len(statuses) >= 6
