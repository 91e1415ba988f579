"""Look-up of host names' addresses, beside the event loop."""

import asyncio
import ipaddress
import socket

from kvrs.config.settings import is_numeric


async def first_address(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """A numeric address of the host, without a look-up if the host is one.

    Raises:
        OSError: no address of this family.
    """
    if is_numeric(host):
        return host
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


async def all_addresses(host: str) -> frozenset[str]:
    """All numeric addresses of a host, of both families.

    Raises:
        OSError: no address, or no answer.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # Addresses with a scope belong to this machine's links, and are not part of DNS.
    written = {str(address[0]) for *_, address in found}
    return frozenset(str(ipaddress.ip_address(each)) for each in written if "%" not in each)
