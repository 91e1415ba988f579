"""The orders to a proxy work as they stand in the pages."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import open_proxy_cluster

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / page for page in ("guide/fleet.md", "guide/operating.md", "research/ranks.md")]
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


async def test_the_orders_of_the_pages_are_obeyed() -> None:
    """At a cluster with the instances that they name. Those about ranks come first: none has
    several, which the answer says. Those that add and remove instances come last.
    """
    text = "".join(page.read_text() for page in PAGES)
    orders = sorted(_ORDER.findall(text), key=lambda each: ("/leave/" not in each, "/inst" in each))

    async with open_proxy_cluster(pairs=2) as system:
        statuses = [await status_of(each, system.proxy.admin_port) for each in orders]

    # The start that a page reports the end of was not up here.
    are_refused = ["/leave/" in each or "/exits/" in each for each in orders]
    assert statuses == [409 if is_refused else 200 for is_refused in are_refused]
    assert len(statuses) >= 6
