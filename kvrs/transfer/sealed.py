"""Sealed facts in shared memory: a process may be killed at any moment, and a half-written fact is
not read as one.
"""

import struct
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

_LENGTH = struct.Struct("<H")
_SEAL = struct.Struct("<Q")
_KIND_BYTES = 16

FACTS_AT = _LENGTH.size  # Offset of the facts within a block, behind their length.
# Bytes of a block in addition to its facts: their length and the seal.
MORE_BYTES = _LENGTH.size + _SEAL.size


def kind_of(*facts: object) -> str:
    """Return one string for all facts on which the layout of memory depends: memory whose string
    differs is not adopted.
    """
    return blake2b(repr(facts).encode(), digest_size=_KIND_BYTES).hexdigest()


def sealed(facts: bytes, number: int = 0) -> bytes:
    """Return a block with the facts and their seal. The seal covers the block's number, so that a
    copy in another block is invalid.
    """
    block = _LENGTH.pack(len(facts)) + facts
    return block + _SEAL.pack(xxh3_64_intdigest(block, seed=number + 1))


def unsealed(block: "bytes | memoryview", number: int = 0) -> bytes | None:
    """Return the facts of a block; None: it is cleared, incomplete, or sealed for another
    number.
    """
    (length,) = _LENGTH.unpack_from(block) if len(block) >= MORE_BYTES else (len(block),)
    facts = bytes(block[FACTS_AT : FACTS_AT + length])
    is_whole = block[: MORE_BYTES + length] == sealed(facts, number)
    return facts if is_whole else None


class SealedBlocks:
    """Consecutive blocks of one size. A cleared block has no facts."""

    def __init__(self, memory: memoryview, first: int, block_bytes: int) -> None:
        """`first`: offset of the first block in `memory`."""
        self._memory, self._first, self._block_bytes = memory, first, block_bytes
        self._nothing = bytes(block_bytes)

    def write(self, number: int, facts: bytes) -> None:
        block = sealed(facts, number)
        assert len(block) <= self._block_bytes
        start = self._first + number * self._block_bytes
        self._memory[start : start + len(block)] = block

    def read(self, number: int) -> bytes | None:
        return unsealed(self.at(number), number)

    def clear(self, number: int) -> None:
        self.at(number)[:] = self._nothing

    def is_clear(self, number: int) -> bool:
        return self.at(number) == self._nothing

    def at(self, number: int) -> memoryview:
        start = self._first + number * self._block_bytes
        return self._memory[start : start + self._block_bytes]
