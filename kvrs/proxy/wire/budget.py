"""The memory that clients' requests may take: a budget in bytes. Pure."""

from types import TracebackType
from typing import Self


class ByteBudget:
    """Bytes of requests that are open. One address leaves a quarter to the others; a gateway in
    front may be the only one.
    """

    def __init__(self, total_bytes: int) -> None:
        self.held_bytes = 0
        self._total_bytes = total_bytes
        self._of_one_bytes = total_bytes * 3 // 4
        self._of_address: dict[str, int] = {}

    def has_room(self, address: str, size_bytes: int) -> bool:
        return (
            self.held_bytes + size_bytes <= self._total_bytes
            and self._of_address.get(address, 0) + size_bytes <= self._of_one_bytes
        )

    def change(self, address: str, by_bytes: int) -> None:
        self.held_bytes += by_bytes
        left = self._of_address[address] = self._of_address.get(address, 0) + by_bytes
        if not left:
            del self._of_address[address]


class Held:
    """The part of a budget that one request holds, until the block that it opens is left."""

    __slots__ = ("_address", "_budget", "_is_over", "size_bytes")

    def __init__(self, budget: ByteBudget, address: str) -> None:
        self._budget = budget
        self._address = address
        self._is_over = False
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.resize(0)
        self._is_over = True

    def has_room(self, size_bytes: int) -> bool:
        """The request could grow to `size_bytes` now."""
        lacking_bytes = size_bytes - self.size_bytes
        return lacking_bytes <= 0 or self._budget.has_room(self._address, lacking_bytes)

    def grow(self, size_bytes: int) -> bool:
        """Take what is lacking to `size_bytes`; whether there was room for it."""
        has_room = self.has_room(size_bytes)
        if has_room and size_bytes > self.size_bytes:
            self.resize(size_bytes)
        return has_room

    def resize(self, size_bytes: int) -> None:
        """Note what is held in any case."""
        if not self._is_over:
            self._budget.change(self._address, size_bytes - self.size_bytes)
            self.size_bytes = size_bytes
