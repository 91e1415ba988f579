"""Addresses of host names, looked up beside the event loop."""

import asyncio
import ipaddress
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


async def all_addresses(host: str) -> frozenset[str]:
    """The numeric addresses of a host, of both families.

    Raises:
        OSError: it has none, or there is no answer.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # One with a scope is of this machine's links only, and no part of DNS.
    written = {str(address[0]) for *_, address in found}
    return frozenset(str(ipaddress.ip_address(each)) for each in written if "%" not in each)
