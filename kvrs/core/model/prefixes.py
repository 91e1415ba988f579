"""An approximate index of the prompt prefixes that instances have cached, or agents store: what the
proxies have sent them, as far as they have room for it.

A prompt is a chain of hashes, each of a block of its bytes and of all before it, so that one entry
of the index stands for everything up to its end. An entry has a bit of each instance that has the
block; each instance has its own order of use, by second chance, and of one prompt the last blocks
go first. An instance may have evicted more, or have more than this proxy knows of: its capacity is
corrected by the cached tokens that it reports. Of agents all of this holds as of instances.

Proxies tell each other what they have sent, in a message of bounded length every `SHARE_S`. What
does not fit, or is lost, costs hits and nothing else.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from math import ceil
from struct import Struct
from typing import Generic, Protocol, TypeVar

import xxhash

from kvrs.core.model.member import Member
from kvrs.ids import InstanceId
from kvrs.protocol.mirror import (
    BYTES_PER_HASH,
    MAX_HASH_BYTES,
    MAX_SENT,
    SentPrompt,
)

BLOCK_BYTES = 1024
_BLOCK = Struct(f"{BLOCK_BYTES}s")
# Blocks of all instances together: about 110 MB. Where their caches hold more, only every second
# block is indexed, or every fourth, and so on.
MOST_BLOCKS = 1_000_000
# The part of an instance's pages that its cache is counted on to have: outputs, and what is being
# computed, take the rest.
_TRUSTED = 0.9
# Corrections of that part, where an instance had less, or more, of a prompt than was predicted.
_LESS, _MORE = 0.97, 1.02
_LEAST_TRUSTED, _MOST_TRUSTED = 0.02, 4.0
# Tokens are not spread evenly over bytes, so that a prediction may be off by a block and this part.
_SLACK = 0.05
# Instances that are lost and have not come back, whose entries are kept for that: a process may
# take over the memory of the one before it.
_MOST_ASLEEP = 8
_SWEPT = 64  # Entries of an instance that is gone, removed with each prompt.
_MOST_INTERNED = 4096
SHARE_S = 0.25


def chain(root: int, text: bytes | memoryview) -> list[int]:
    """Hashes of the full blocks of a text, each of all up to its end. `root` stands for what else
    must be equal for the KV to be.
    """
    hashes: list[int] = []
    digest, whole = xxhash.xxh3_64_intdigest, len(text) // BLOCK_BYTES * BLOCK_BYTES
    # A comprehension would be one more call of each request.
    for (block,) in _BLOCK.iter_unpack(memoryview(text)[:whole]):
        root = digest(block, root)
        hashes.append(root)
    return hashes


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chain of a prompt's full blocks, and how long the prompt is."""

    hashes: Sequence[int] = ()
    size_bytes: int = 0

    def tokens(self, blocks: int, prompt_tokens: int) -> int:
        """How many tokens so many leading blocks have; the last token of a prompt is computed in
        any case.
        """
        if not blocks:
            return 0
        return min(prompt_tokens * blocks * BLOCK_BYTES // self.size_bytes, prompt_tokens - 1)


NO_PREFIX = Prefix()


@dataclass(slots=True, eq=False)
class _Cache:
    """The blocks that one instance is taken to have."""

    bit: int
    order: deque[int] = field(default_factory=deque)  # The next one to be evicted first.
    touched: set[int] = field(default_factory=set)  # They are passed over once.
    # Pages that it has had free, or its tier, in tokens; 0: it has not reported.
    capacity_tokens: int = 0
    trusted: float = _TRUSTED
    block_tokens: float = 0.0  # Mean of the last prompts.

    def blocks(self) -> float:
        """How many blocks it has room for."""
        return self.trusted * self.capacity_tokens / self.block_tokens


@dataclass(slots=True)
class Hits:
    """Prompt tokens that an instance has answered for, and those that it found in its cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class CacheHolder(Protocol):
    """An instance with a prefix cache, or an agent."""

    id: InstanceId
    epoch: int
    cache_bit: int
    caches: bool


H = TypeVar("H", bound=CacheHolder)


def room_tokens(member: Member) -> int:
    """Tokens of which an instance has room for the KV now; 0: it has not reported."""
    if (load := member.load) is None:
        return 0
    # A tier has what the pages have, and what has gone from these.
    return max(load.free_pages * member.page_size_tokens, member.tier_tokens)


class PrefixIndex(Generic[H]):
    def __init__(self, room_tokens: Callable[[H], int]) -> None:
        """`room_tokens`: how many tokens a holder has room for; 0: not known."""
        self._room_tokens = room_tokens
        self.caching: set[InstanceId] = set()  # Instances that are up and have a prefix cache.
        self.hits: dict[InstanceId, Hits] = {}  # Of those that report what they found.
        self._masks: dict[int, int] = {}  # Bits of the instances that have it, by block.
        self._interned: dict[int, int] = {}  # Most blocks have one of few masks.
        self._live = 0  # Bits of instances that are up; others count nowhere.
        self._caches: dict[InstanceId, _Cache] = {}
        self._members: list[H | None] = []  # By the number of the bit.
        self._asleep: OrderedDict[InstanceId, _Cache] = OrderedDict()
        self._gone: list[_Cache] = []  # Their entries are removed bit by bit.
        self._free: list[int] = []  # Numbers of bits.
        self._stride = 1
        self._blocks = 0  # Of all instances together.
        # What this proxy has sent, and has told no other one.
        self._sent = deque[tuple[H, Prefix, int]](maxlen=MAX_SENT)

    def __len__(self) -> int:
        """Pairs of a block and an instance."""
        return self._blocks

    # Instances.

    def up(self, member: H, *, keeps: bool) -> None:
        """A process has come up. `keeps`: it has the memory of the one before it."""
        if not member.caches:
            return
        self.caching.add(member.id)
        cache = self._asleep.pop(member.id, None)
        if cache is None:
            return
        if not keeps:
            self._gone.append(cache)
            return
        self._caches[member.id] = cache
        self._take(member, cache)

    def lost(self, member: H) -> None:
        """Its process has ended, or is taken for lost. O(1): entries are removed later."""
        self.caching.discard(member.id)
        cache = self._caches.pop(member.id, None)
        if cache is None:
            return
        self._live &= ~cache.bit
        member.cache_bit, self._members[_number(cache.bit)] = 0, None
        self._asleep[member.id] = cache
        if len(self._asleep) > _MOST_ASLEEP:
            self._gone.append(self._asleep.popitem(last=False)[1])

    def removed(self, name: InstanceId) -> None:
        """The instance is lost, and is none of the cluster any more."""
        self.hits.pop(name, None)
        if (cache := self._asleep.pop(name, None)) is not None:
            self._gone.append(cache)

    def of_bits(self, mask: int) -> Iterator[H]:
        """The holders of these bits."""
        while mask:
            low = mask & -mask
            member = self._members[_number(low)]
            assert member is not None, mask
            yield member
            mask ^= low

    def _take(self, member: H, cache: _Cache) -> None:
        self._live |= cache.bit
        member.cache_bit, self._members[_number(cache.bit)] = cache.bit, member

    def _cache_of(self, member: H) -> _Cache:
        cache = self._caches.get(member.id)
        if cache is None:
            if not self._free:
                self._free.append(len(self._members))
                self._members.append(None)
            cache = self._caches[member.id] = _Cache(1 << self._free.pop())
            self._take(member, cache)
        return cache

    # Blocks.

    def levels(self, prefix: Prefix) -> list[tuple[int, int]]:
        """How many leading blocks instances have, fewest first, with the bits of those that have
        exactly so many. Instances with none are left out.
        """
        masks, having, stride = self._masks, self._live, self._stride
        found: list[tuple[int, int]] = []
        hashes = prefix.hashes if stride == 1 else prefix.hashes[stride - 1 :: stride]
        if not having or not hashes:
            return found
        for index, block in enumerate(hashes):
            still = masks.get(block, 0) & having
            if still != having:
                if index:
                    found.append((index * stride, having ^ still))
                if not still:
                    return found
                having = still
        found.append((len(hashes) * stride, having))
        return found

    def send(self, member: H, prefix: Prefix, prompt_tokens: int) -> None:
        """Note that this proxy sends the instance a prompt."""
        if prefix.hashes and member.caches:
            self.note(member, prefix, prompt_tokens)
            self._sent.append((member, prefix, prompt_tokens))

    def take_sent(self, room_bytes: int = MAX_HASH_BYTES) -> list[SentPrompt]:
        """Return what this proxy has sent since the last call, as far as its hashes fit into so
        many bytes of a message to the others.
        """
        sent = []
        for member, prefix, prompt_tokens in self._sent:
            if (size_bytes := BYTES_PER_HASH * len(prefix.hashes)) <= room_bytes:
                room_bytes -= size_bytes
                hashes = array("Q", prefix.hashes).tobytes()
                sent.append(
                    SentPrompt(member.id, member.epoch, prompt_tokens, prefix.size_bytes, hashes)
                )
        self._sent.clear()
        return sent

    def note_sent(self, member: H, sent: SentPrompt) -> None:
        """Another proxy has sent a prompt to this process of an instance."""
        prefix = Prefix(array("Q", sent.hashes), sent.size_bytes)
        self.note(member, prefix, sent.prompt_tokens)

    def note(self, member: H, prefix: Prefix, prompt_tokens: int) -> None:
        """The instance gets this prompt, and will have it."""
        if not member.caches or not prefix.hashes:
            return
        cache, masks = self._cache_of(member), self._masks
        self._measure(cache, member, prompt_tokens * BLOCK_BYTES / prefix.size_bytes)
        hashes = prefix.hashes[self._stride - 1 :: self._stride]
        bit, order = cache.bit, cache.order
        known = [block for block in hashes if masks.get(block, 0) & bit]
        cache.touched.update(known)
        # Room is made before, so that what has just come is not the first to go.
        self._make_room(cache, len(hashes) - len(known), kept=set(known))
        for block in reversed(hashes):
            mask = masks.get(block, 0)
            if not mask & bit:
                masks[block] = self._intern(mask | bit)
                order.append(block)
                self._blocks += 1
        self._make_room(cache, 0)
        if self._gone:
            self._sweep(_SWEPT + 2 * len(prefix.hashes))

    def _make_room(self, cache: _Cache, blocks: int, *, kept: Set[int] = frozenset()) -> None:
        """Evict until an instance, and the index, have room for so many more, which belong to those
        that are kept.
        """
        limit = cache.blocks() / self._stride if cache.capacity_tokens else MOST_BLOCKS
        self._evict(cache, ceil(max(0.0, len(cache.order) + blocks - limit)), kept)
        while self._blocks + blocks > MOST_BLOCKS and (self._gone or self._asleep):
            if not self._gone:
                self._gone.append(self._asleep.popitem(last=False)[1])
            self._sweep(_SWEPT + blocks)
        while (over := self._blocks + blocks - MOST_BLOCKS) > 0 and self._blocks:
            fullest = max(self._caches.values(), key=lambda each: len(each.order))
            self._evict(fullest, min(over, len(fullest.order)), kept)

    def _evict(self, cache: _Cache, count: int, kept: Set[int]) -> None:
        """Evict so many blocks of an instance, those that were not used lately first and those that
        are kept last, as far as they are found soon.
        """
        order, touched, spared = cache.order, cache.touched, _SWEPT + 8 * count
        while count and order:
            block = order.popleft()
            if block in touched or block in kept:
                touched.discard(block)
                if spared:
                    spared -= 1
                    order.append(block)
                    continue
            self._clear(block, cache.bit)
            count -= 1

    def _measure(self, cache: _Cache, member: H, block_tokens: float) -> None:
        """Follow the sizes of its blocks and of its cache."""
        before = cache.block_tokens or block_tokens
        cache.block_tokens = max(1.0, before + (block_tokens - before) / 16)
        if (capacity_tokens := self._room_tokens(member)) > cache.capacity_tokens:
            cache.capacity_tokens = capacity_tokens
            room = sum(each.blocks() for each in self._caches.values() if each.block_tokens)
            if room > MOST_BLOCKS * self._stride:
                while room > MOST_BLOCKS * self._stride:
                    self._stride *= 2
                self._forget()

    def _forget(self) -> None:
        """Entries of another stride are never looked up."""
        self._masks.clear()
        self._interned.clear()
        self._blocks = 0
        for cache in (*self._caches.values(), *self._asleep.values(), *self._gone):
            cache.order.clear()
            cache.touched.clear()

    def _intern(self, mask: int) -> int:
        if len(self._interned) > _MOST_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)

    def _clear(self, block: int, bit: int) -> None:
        self._blocks -= 1
        if left := self._masks[block] & ~bit:
            self._masks[block] = self._intern(left)
        else:
            del self._masks[block]

    def _sweep(self, count: int) -> None:
        cache = self._gone[0]
        for _ in range(min(count, len(cache.order))):
            self._clear(cache.order.popleft(), cache.bit)
        if not cache.order:
            self._free.append(_number(cache.bit))
            del self._gone[0]

    # What instances report.

    def count(self, member: H, prompt_tokens: int, found: int) -> None:
        """The instance has computed a prompt, of which it has found so many tokens."""
        hits = self.hits.setdefault(member.id, Hits())
        hits.prompt_tokens += prompt_tokens
        hits.cached_tokens += found

    def correct(
        self, member: H, prefix: Prefix, predicted: int, found: int, *, finds_others: bool = False
    ) -> None:
        """Correct how far an instance's predictions are trusted. `predicted`, `found`: tokens of
        one prompt that its cache was expected to have, and had. `finds_others`: the cache may have
        prompts too that this proxy did not send.
        """
        cache = self._caches.get(member.id)
        if cache is None or not prefix.hashes:
            return
        slack = self._stride * cache.block_tokens + _SLACK * predicted
        if found < predicted - slack:
            cache.trusted = max(_LEAST_TRUSTED, cache.trusted * _LESS)
        elif found > predicted + slack and not finds_others:
            cache.trusted = min(_MOST_TRUSTED, cache.trusted * _MORE)


def _number(bit: int) -> int:
    return bit.bit_length() - 1
