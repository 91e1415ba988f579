"""Addresses of host names, looked up beside the event loop."""

import asyncio
import socket

from kvrs.config.settings import is_numeric


async def first_address(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """A numeric address of the host; at once, where it is one.

    Raises:
        OSError: it has none of this family.
    """
    if is_numeric(host):
        return host
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    return str(found[0][4][0])
