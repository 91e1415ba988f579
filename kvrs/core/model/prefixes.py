"""An approximate index of the prompt prefixes that instances have cached or agents store, derived
from the prompts that proxies have sent there and from the room of each holder.

A prompt is a chain of hashes over blocks of its bytes, each hash covering all earlier blocks, so
that one entry stands for a whole prefix. An entry is a bit mask of the holders of its block. Each
holder evicts by second chance, the last blocks of a prompt first. The real cache may differ; the
presumed capacity is corrected by the cached tokens that an instance reports.

Proxies share the prompts that they have sent, in a bounded message every `SHARE_S`. A prompt that
does not fit or is lost only costs cache hits.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from math import ceil
from struct import Struct
from typing import Generic, Protocol, TypeVar

import xxhash

from kvrs.core.model.member import Abilities, Member
from kvrs.ids import InstanceId
from kvrs.protocol.mirror import (
    BYTES_PER_HASH,
    MAX_HASH_BYTES,
    MAX_SENT,
    SentPrompt,
)

BLOCK_BYTES = 1024
_BLOCK = Struct(f"{BLOCK_BYTES}s")
# Limit of the blocks of all instances together: about 110 MB. For larger caches only every second,
# fourth, ... block is indexed.
MOST_BLOCKS = 1_000_000
# The initial share of an instance's pages that is presumed to cache prompts; outputs and running
# computations take the rest.
_TRUSTED = 0.9
# Correction factors of the share after an instance had fewer, or more, tokens than predicted.
_LESS, _MORE = 0.97, 1.02
_LEAST_TRUSTED, _MOST_TRUSTED = 0.02, 4.0
# Tolerated relative error of a prediction, beside one block: tokens differ in bytes.
_SLACK = 0.05
# Limit of lost instances whose entries are kept, because a new process may take over the memory.
_MOST_ASLEEP = 8
_SWEPT = 64  # Entries of removed instances that each new prompt deletes.
_MOST_INTERNED = 4096
SHARE_S = 0.25


def chain(root: int, text: bytes | memoryview) -> list[int]:
    """Return a hash per full block of the text; each covers the text up to the block's end. `root`
    identifies the model, adapter and tenant.
    """
    hashes: list[int] = []
    digest, whole = xxhash.xxh3_64_intdigest, len(text) // BLOCK_BYTES * BLOCK_BYTES
    # A comprehension would add a call to each request.
    for (block,) in _BLOCK.iter_unpack(memoryview(text)[:whole]):
        root = digest(block, root)
        hashes.append(root)
    return hashes


@dataclass(frozen=True, slots=True)
class Prefix:
    """The hash chain of a prompt's full blocks, and the size of the prompt."""

    hashes: Sequence[int] = ()
    size_bytes: int = 0

    def tokens(self, blocks: int, prompt_tokens: int) -> int:
        """Return the number of tokens in the leading blocks, without the prompt's last token, which
        is always computed.
        """
        if not blocks:
            return 0
        return min(prompt_tokens * blocks * BLOCK_BYTES // self.size_bytes, prompt_tokens - 1)


NO_PREFIX = Prefix()


@dataclass(slots=True, eq=False)
class _Cache:
    """The blocks that one holder is presumed to have."""

    bit: int
    order: deque[int] = field(default_factory=deque)  # Block hashes in order of eviction.
    # Blocks that eviction spares once more (second chance).
    touched: set[int] = field(default_factory=set)
    capacity_tokens: int = 0  # The largest room reported; 0: none was reported.
    trusted: float = _TRUSTED
    block_tokens: float = 0.0  # Moving average of the holder's tokens per block.

    def blocks(self) -> float:
        """Return the number of blocks that fit into the holder's presumed room."""
        return self.trusted * self.capacity_tokens / self.block_tokens


@dataclass(slots=True)
class Hits:
    """The prompt tokens that an instance has computed, and the part that came from its cache."""

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
    abilities: Abilities


H = TypeVar("H", bound=CacheHolder)


def room_tokens(member: Member) -> int:
    """Return the number of tokens whose KV the instance has room for; 0: not reported."""
    if (load := member.load) is None:
        return 0
    # A CPU tier has a copy of the pages too, so the two are not added.
    return max(load.free_pages * member.abilities.page_size_tokens, member.shared.tier_tokens)


class PrefixIndex(Generic[H]):
    def __init__(self, room_tokens: Callable[[H], int]) -> None:
        """`room_tokens` returns the number of tokens whose KV a holder has room for; 0: unknown."""
        self._room_tokens = room_tokens
        self.caching: set[InstanceId] = set()  # Instances that are up and have a prefix cache.
        # Counts of each instance that reports cached tokens.
        self.hits: dict[InstanceId, Hits] = {}
        self._masks: dict[int, int] = {}  # Bit mask of the holders of each block.
        self._interned: dict[int, int] = {}  # Shared mask objects: most blocks have one of a few.
        self._live = 0  # Bit mask of the holders that are up; other bits do not count.
        self._caches: dict[InstanceId, _Cache] = {}
        self._members: list[H | None] = []  # Holder of each bit number.
        # Caches of lost instances, whose next process may have their memory.
        self._asleep: OrderedDict[InstanceId, _Cache] = OrderedDict()
        self._gone: list[_Cache] = []  # Caches whose entries `_sweep` deletes step by step.
        self._free: list[int] = []  # Unused bit numbers.
        self._stride = 1  # Every `_stride`-th block is indexed.
        self._blocks = 0  # Number of (block, holder) pairs.
        # Prompts that this proxy has sent and not yet shared with the other proxies.
        self._sent = deque[tuple[H, Prefix, int]](maxlen=MAX_SENT)

    def __len__(self) -> int:
        """Return the number of (block, holder) pairs."""
        return self._blocks

    def up(self, member: H, *, keeps: bool) -> None:
        """Add a new process. `keeps`: it has taken over the memory of the previous process."""
        if not member.abilities.caches:
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
        """Remove a lost process in O(1); its entries are deleted later."""
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
        """Forget an instance that has left the cluster."""
        self.hits.pop(name, None)
        if (cache := self._asleep.pop(name, None)) is not None:
            self._gone.append(cache)

    def of_bits(self, mask: int) -> Iterator[H]:
        """Yield the holders whose bits are set in the mask."""
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

    def levels(self, prefix: Prefix) -> list[tuple[int, int]]:
        """Return (number of leading blocks, bit mask of the holders with exactly that number),
        fewest blocks first; holders with no block are left out.
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
        """Note that this proxy sends a prompt to the instance, and share it with other proxies."""
        if prefix.hashes and member.abilities.caches:
            self.note(member, prefix, prompt_tokens)
            self._sent.append((member, prefix, prompt_tokens))

    def take_sent(self, room_bytes: int = MAX_HASH_BYTES) -> list[SentPrompt]:
        """Return the prompts that this proxy has sent since the last call; prompts whose hashes do
        not fit into `room_bytes` are dropped.
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
        """Note a prompt that another proxy has sent to the instance."""
        prefix = Prefix(array("Q", sent.hashes), sent.size_bytes)
        self.note(member, prefix, sent.prompt_tokens)

    def note(self, member: H, prefix: Prefix, prompt_tokens: int) -> None:
        """Add the prompt's blocks to the instance's presumed cache."""
        if not member.abilities.caches or not prefix.hashes:
            return
        cache, masks = self._cache_of(member), self._masks
        self._measure(cache, member, prompt_tokens * BLOCK_BYTES / prefix.size_bytes)
        hashes = prefix.hashes[self._stride - 1 :: self._stride]
        bit, order = cache.bit, cache.order
        known = [block for block in hashes if masks.get(block, 0) & bit]
        cache.touched.update(known)
        # Evict first, so that the new blocks are not evicted themselves.
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
        """Evict until the instance and the index have room for `blocks` more; blocks in `kept`, of
        the same prompt, are evicted last.
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
        """Evict `count` blocks of an instance by second chance, blocks in `kept` last. A limit on
        spared blocks bounds the time.
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
        """Update the tokens per block and the capacity; double the stride if the index is too
        small.
        """
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
        """Delete all entries: entries of the previous stride are never looked up."""
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

    def count(self, member: H, prompt_tokens: int, found: int) -> None:
        """Count a prompt that the instance has computed, with `found` tokens from its cache."""
        hits = self.hits.setdefault(member.id, Hits())
        hits.prompt_tokens += prompt_tokens
        hits.cached_tokens += found

    def correct(
        self, member: H, prefix: Prefix, predicted: int, found: int, *, finds_others: bool = False
    ) -> None:
        """Correct the presumed share of an instance's pages that caches prompts.

        `predicted` and `found` are the expected and the real cached tokens of one prompt.
        `finds_others`: the cache may have prompts that no proxy has shared with this one.
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
