"""A DNS server for the hosts of a test, as far as a resolver that asks for addresses needs one."""

import asyncio
import ipaddress
import struct
from collections import Counter
from collections.abc import Sequence

PORT = 53
_A, _AAAA = 1, 28
_IS_ANSWER = 0x8580  # Flags: authoritative, recursion available.
_NO_SERVICE, _NO_NAME = 2, 3  # Response codes.
_NAME_OF_QUESTION = 0xC00C  # A pointer to where the question has it.


class NameServer(asyncio.DatagramProtocol):
    """Answers over UDP. A name that is not there does not exist."""

    def __init__(self) -> None:
        self.names: dict[str, Sequence[str]] = {}  # Numeric addresses of both families.
        self.is_failing = False  # Every answer is a failure of the server.
        self.is_silent = False
        self.asked: Counter[str] = Counter()  # By name.

    async def start(self, host: str) -> None:
        """Listen at a numeric address, where this thread opens its sockets now."""
        loop = asyncio.get_running_loop()
        self._datagrams, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=(host, PORT)
        )

    def close(self) -> None:
        self._datagrams.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._answer(data)
        if not self.is_silent:
            self._datagrams.sendto(answer, addr)

    def _answer(self, packet: bytes) -> bytes:
        name, kind, _ = _question(packet)
        self.asked[name] += 1
        if self.is_failing:
            return self._packet(packet, [], flags=_IS_ANSWER | _NO_SERVICE)
        if name not in self.names:
            return self._packet(packet, [], flags=_IS_ANSWER | _NO_NAME)
        version = {_A: 4, _AAAA: 6}.get(kind)
        found = map(ipaddress.ip_address, self.names[name])
        return self._packet(packet, [each.packed for each in found if each.version == version])

    def _packet(self, packet: bytes, found: Sequence[bytes], flags: int = _IS_ANSWER) -> bytes:
        _, kind, end = _question(packet)
        head = packet[:2] + struct.pack("!HHHHH", flags, 1, len(found), 0, 0)
        records = [
            struct.pack("!HHHIH", _NAME_OF_QUESTION, kind, 1, 0, len(each)) + each for each in found
        ]
        return head + packet[12:end] + b"".join(records)


def _question(packet: bytes) -> tuple[str, int, int]:
    """The name in lower case, the type of its records, and where the question ends."""
    at, labels = 12, []
    while size := packet[at]:
        labels.append(packet[at + 1 : at + 1 + size].decode())
        at += 1 + size
    (kind,) = struct.unpack_from("!H", packet, at + 1)
    return ".".join(labels).lower(), kind, at + 5
