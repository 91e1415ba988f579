"""Look-up of host names' addresses, beside the event loop."""

import asyncio
import ipaddress
import socket

from kvrs.config.settings import is_numeric


async def first_address(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """Return a numeric address of the host; a numeric host is returned without a look-up.

    Raises:
        OSError: the host has no address of this family.
    """
    if is_numeric(host):
        return host
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


async def all_addresses(host: str) -> frozenset[str]:
    """Return all numeric addresses of a host, of IPv4 and IPv6.

    Raises:
        OSError: the host has no address, or the look-up failed.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # Addresses with a scope (after `%`) are valid only on this machine's links, and do not come
    # from DNS.
    written = {str(address[0]) for *_, address in found}
    return frozenset(str(ipaddress.ip_address(each)) for each in written if "%" not in each)
