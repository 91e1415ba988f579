"""The policy's view of instances, agents and links: reported facts, and this proxy's own bookings.

Reports are as old as the last poll; bookings count at once. The queue of an instance and the
reserved bytes of an agent are the larger of report and booking, because each misses a part of the
other.

An approximate index of the prompt prefixes that instances have cached or agents store, derived
from the prompts that proxies have sent there and from the room of each holder.

A prompt is a chain of hashes over blocks of its bytes, each hash covering all earlier blocks, so
that one entry stands for a whole prefix. An entry is a bit mask of the holders of its block. Each
holder evicts by second chance, the last blocks of a prompt first. The real cache may differ; the
presumed capacity is corrected by the cached tokens that an instance reports.

Proxies share the prompts that they have sent, in a bounded message every `SHARE_S`. A prompt that
does not fit or is lost only costs cache hits.
"""

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import ceil
from operator import attrgetter
from statistics import median
from struct import Struct
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import xxhash

from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Abilities, Member
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import MEMORY, STORE
from kvrs.protocol.mirror import BYTES_PER_HASH, MAX_HASH_BYTES, MAX_SENT, SentPrompt

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


# Upper limit of `prompt_weight`: cost of a second of computing, in seconds of a queue.
_MOST_WEIGHT = 8.0

_place, _streams = attrgetter("place"), attrgetter("streams")


@dataclass(slots=True, eq=False)
class Link:
    bytes_per_s: float  # Lower bound of the rate, on which decisions count; or the assumed rate.
    measured: bool = False
    in_flight_bytes: int = 0  # Bytes of this proxy's transfers that have not finished.
    in_flight: int = 0  # Number of these transfers.
    mean_bytes_per_s: float = 0.0  # Mean rate, which predicts; 0: not known.

    def measure(self, bytes_per_s: float, mean_bytes_per_s: float = 0.0) -> None:
        if bytes_per_s > 0:
            self.bytes_per_s, self.measured = bytes_per_s, True
            self.mean_bytes_per_s = mean_bytes_per_s

    @property
    def counted_share(self) -> float:
        """Share of the mean rate on which decisions count; 1 if the mean is not known."""
        return self.bytes_per_s / self.mean_bytes_per_s if self.mean_bytes_per_s else 1.0


class PrefillOrder:
    """The prefill instances that are not drained, with the work that was sent to them, sorted by
    this work, then by the streams of the least loaded decode instance on their node, then by id.

    A change marks the node; marked nodes are sorted when the order is read.
    """

    def __init__(self, by_node: Mapping[NodeId, Sequence[Member]]) -> None:
        self.members: list[Member] = []  # Members, sorted as at the last call of `least_first`.
        self._by_node = by_node
        # Nodes whose instances have changed in work, streams or pairs.
        self.changed: dict[NodeId, None] = {}
        # Instances passed to `restrict`; `has_restricted` removes those that no pause holds back.
        self.restricted: dict[Member, None] = {}
        # Numbers of prompts without an answer at prefill instances: by this proxy's bookings, and
        # by the instances' reports.
        self._prompts = 0
        self._reported_prompts = 0

    def add(self, member: Member) -> None:
        member.is_placed = True
        insort(self.members, member, key=_place)
        self.changed[member.node] = None

    def remove(self, member: Member) -> None:
        member.is_placed = False
        del self.members[self._index(member)]

    def note_queue(self, member: Member, reported_s: float) -> None:
        """Note the queueing delay that an instance reports."""
        member.note_queue(reported_s)
        self.changed[member.node] = None

    def restrict(self, member: Member) -> None:
        """Note a decode instance that may refuse some streams during a pause."""
        self.restricted[member] = None

    def has_restricted(self) -> bool:
        """Return whether any decode instance may refuse some streams."""
        for member in [*self.restricted]:
            if member.answers.busy_until_s is None:
                del self.restricted[member]
        return bool(self.restricted)

    def book(self, member: Member, seconds: float, now_s: float, *, is_history: bool) -> None:
        """Note work that an instance gets."""
        if not member.bookings:
            member.head_since_s = now_s
        member.work_s += seconds
        if is_history:
            member.history_work_s += seconds
            member.ahead_s += seconds
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self.changed[member.node] = None
        member.bookings += 1
        self._prompts += member.abilities.prefills

    def unbook(self, member: Member, seconds: float, now_s: float, *, is_history: bool) -> None:
        """Note that booked work is done, or given up."""
        member.bookings -= 1
        member.head_since_s = now_s
        if is_history:
            member.history_work_s = max(0.0, member.history_work_s - seconds)
        self._prompts -= member.abilities.prefills
        # Idle instances must have exactly zero: a rounding error would decide between them.
        member.work_s = max(0.0, member.work_s - seconds) if member.bookings else 0.0
        member.history_work_s = min(member.history_work_s, member.work_s)
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self.changed[member.node] = None

    def note_prompts(self, member: Member, prompts: int) -> None:
        """Note the number of prompts that a prefill instance runs or queues by its report."""
        self._reported_prompts += prompts - member.reported_prompts
        member.reported_prompts = prompts

    def prompt_weight(self, prefillers: int) -> float:
        """Return the cost of a second of compute time, in seconds of a queue: 1 for the prompt
        itself, plus 1 for each prompt behind it, which is the number of prompts in flight per
        prefill instance.
        """
        prompts = max(self._prompts, self._reported_prompts)
        return min(_MOST_WEIGHT, 1 + prompts / max(1, prefillers))

    def least_first(self) -> list[Member]:
        """Return the sorted list; the caller must not change it, nor keep it over a change."""
        for node in self.changed:
            # Fewest streams in a list of own decode instances, by `id` of the list, which members
            # share.
            least: dict[int, int] = {}
            for member in self._by_node.get(node, ()):
                if not member.is_placed:
                    continue
                pairs = member.own_decoders
                if (streams := least.get(id(pairs))) is None:
                    streams = min(map(_streams, pairs), default=0)
                    least[id(pairs)] = streams
                place = member.queue_s, streams, member.id
                if place != member.place:
                    del self.members[self._index(member)]
                    member.place = place
                    insort(self.members, member, key=_place)
        self.changed.clear()
        return self.members

    def _index(self, member: Member) -> int:
        at = bisect_left(self.members, member.place, key=_place)
        assert self.members[at] is member, member
        return at


class ClusterView:
    def __init__(self, assumed_link_bytes_per_s: float) -> None:
        self.members: dict[InstanceId, Member] = {}
        self.agents: dict[InstanceId, Agent] = {}
        # All shared KV stores of engines, as one agent without a process.
        self.store = Agent(InstanceId(STORE), STORE)
        # Links by (source, target) node, created by `link`.
        self.links: dict[tuple[NodeId, NodeId], Link] = {}
        self.assumed_link = Link(assumed_link_bytes_per_s)
        self.now_s = 0.0  # Time of the current event.
        self.tokens_differ = False  # Two decode instances compute different tokens.
        self.has_doubted = False  # `Member.is_doubted` of any.
        self.formats_differ = False  # NIXL cannot carry hand-offs between some instances.
        # Decode instances that are not drained, sorted by rank: the least loaded first.
        self.decoders: list[Member] = []
        self.by_node: dict[NodeId, list[Member]] = {}
        # Decode instances among `decoders` on nodes where no prefill instance takes prompts.
        self.unpaired: set[Member] = set()
        self.prefill_order = PrefillOrder(self.by_node)
        # Prefill instances that are not drained; their order may be outdated.
        self.prefillers = self.prefill_order.members
        self.prefixes = PrefixIndex[Member](room_tokens)
        self.stored = PrefixIndex[Agent](attrgetter("room_tokens"))
        self._leaving: dict[InstanceId, Member] = {}  # Instances that must drain or are drained.

    def add(self, member: Member) -> Member:
        assert member.id not in self.members, member.id
        self.members[member.id] = member
        self.by_node.setdefault(member.node, []).append(member)
        if member.abilities.decodes:
            self._set_ranked(member, True)
        if member.abilities.prefills:
            self.prefill_order.add(member)
        self.formats_differ = _differ({each.info.hand_off_format for each in self.members.values()})
        self.update(member)
        return member

    def set_self_tested(self, member: Member, event: ev.InstanceUp | ev.SelfTested) -> None:
        member.moves_kv, member.tokens = event.moves_kv, event.tokens
        member.is_doubted = event.is_doubted
        member.generates = event.generates
        member.restores = event.moves_kv if event.restores is None else event.restores
        if not member.shared.has_tier and (store := event.store) is not None:
            member.set_rows(store.namespace, in_store=True)
            member.restores = store.restores
            member.shared = msgspec.structs.replace(member.shared, store_share=store.share)
        elif member.shared.in_store:
            member.set_rows("")
        self._compare_tokens()
        self.update(member)

    def remove(self, member: Member) -> None:
        self.prefill_order.note_prompts(member, 0)
        self.prefixes.lost(member)
        del self.members[member.id]
        self.by_node[member.node].remove(member)
        if member.is_ranked:
            self._set_ranked(member, False)
            self.unpaired.discard(member)
        if member.is_placed:
            self.prefill_order.remove(member)
        self.prefill_order.restricted.pop(member, None)
        self._leaving.pop(member.id, None)
        if member.tokens or member.is_doubted:
            self._compare_tokens()
        self.formats_differ = _differ({each.info.hand_off_format for each in self.members.values()})
        self._update(member.node)

    def update(self, changed: Member) -> None:
        """Update drains and pairs after a change of a member's facts or of its reasons to drain."""
        if changed.must_drain:
            self._leaving[changed.id] = changed
        self._update(changed.node)

    def _update(self, changed: NodeId) -> None:
        if self._leaving:
            self._update_drained()
        self._update_pairs(changed)

    @property
    def generates(self) -> str:
        """`Member.generates` of all decode instances; empty: it is not known, or they differ."""
        found = {member.generates for member in self.members.values() if member.abilities.decodes}
        return found.pop() if len(found) == 1 else ""

    def _compare_tokens(self) -> None:
        members = self.members.values()
        tokens = {member.tokens for member in members if member.abilities.decodes and member.tokens}
        self.tokens_differ = len(tokens) > 1
        self.has_doubted = any(member.is_doubted for member in members)

    def _update_drained(self) -> None:
        """Drain each instance that must drain, if healthy instances have its roles; if all are
        degraded, none is drained. For an instance that will end, a re-forming instance counts as
        healthy.
        """
        members = self.members.values()
        healthy = [each for each in members if not each.must_drain]
        lasting = [each for each in members if not each.is_to_end]
        for member in [*self._leaving.values()]:
            others = lasting if member.is_to_end else healthy
            is_drained = member.must_drain and have_roles_of(member, others)
            if is_drained != member.is_drained:
                member.is_drained = is_drained
                if member.abilities.decodes:
                    self._set_ranked(member, not is_drained)
                if is_drained and member.is_placed:
                    self.prefill_order.remove(member)
                elif not is_drained and member.abilities.prefills:
                    self.prefill_order.add(member)
                self._update_pairs(member.node)
            if not member.must_drain:
                del self._leaving[member.id]

    def _update_pairs(self, node: NodeId) -> None:
        there = self.by_node[node]
        decoders = [each for each in there if each.abilities.decodes and not each.is_drained]
        self.unpaired.difference_update(there)
        if not any(each.abilities.prefills and not each.is_drained for each in there):
            self.unpaired.update(decoders)
        are_free = not self.formats_differ and all(
            each.abilities.pulls or each.info.own_prefill is None for each in decoders
        )
        for prefill in there:
            if prefill.abilities.prefills:
                prefill.own_decoders = (
                    decoders
                    if are_free
                    else [member for member in decoders if member.takes_from(prefill)]
                )
        self.prefill_order.changed[node] = None

    def count_stream(self, member: Member, change: int) -> None:
        """Change the number of a member's streams by `change`, and keep the decode instances
        sorted.
        """
        decoders = self.decoders
        at = bisect_left(decoders, member.rank, key=_rank) if member.is_ranked else None
        assert at is None or decoders[at] is member, member
        member.streams += change
        member.rank = member.streams, member.id
        self.prefill_order.changed[member.node] = None
        if at is None:
            return
        beside = at + 1 if change > 0 else at - 1
        if 0 <= beside < len(decoders) and (decoders[beside].rank < member.rank) is (change > 0):
            del decoders[at]
            insort(decoders, member, key=_rank)

    def has_better(self, doubted: Member, name: str) -> bool:
        """Return whether instances whose weights are not doubted have the roles of this one, and
        serve this model name (empty: any); slow ones do.
        """
        others = [
            each
            for each in self.members.values()
            if not (each.is_doubted or each.is_drained or each.answers.is_ejected)
            and (not name or name in each.abilities.names)
        ]
        return have_roles_of(doubted, others)

    def share_slowness(self, member: Member) -> None:
        """Let instances with the same prefill table as this one, which have reported no slowness
        of their own, have the median of those that have.
        """
        label = member.times.full_table.label
        alike = [
            each
            for each in self.members.values()
            if each.times.observed is None and each.times.full_table.label == label
        ]
        if known := [each.times.slowness for each in alike if each.times.has_own_slowness]:
            for each in alike:
                if not each.times.has_own_slowness:
                    each.times.set_slowness(median(known))

    def look_ahead(self) -> None:
        """Count the work before histories that come now, at each instance (`Member.ahead_s`)."""
        for member in self.members.values():
            member.ahead_s = member.wait_of_history_s(self.now_s) if member.queue_s else 0.0

    def takes_start(self, member: Member) -> bool:
        """Return whether the instance's recent answers allow a new request."""
        health = member.answers
        if member.is_doubted or member.is_unwell or self.now_s < member.hung_until_s:
            return False
        # After its pause, a closed instance gets one probe at a time.
        if health.until_s is not None and (health.probe is not None or self.now_s < health.until_s):
            return False
        return not health.awaited or not health.is_overdue(self.now_s, member.reported_queue_s)

    def takes_recovery(self, member: Member) -> bool:
        """Return whether the instance's recent answers allow an interrupted stream, which is never
        a probe.
        """
        health = member.answers
        if health.is_ejected or self.now_s < member.hung_until_s:
            return False
        if health.until_s is not None and self.now_s < health.until_s:
            return False
        return not health.awaited or not health.is_overdue(self.now_s, member.reported_queue_s)

    def is_busy(self, member: Member) -> bool:
        """Return whether the instance is in a pause after a busy answer."""
        return member.answers.is_busy(self.now_s)

    def is_healthy(self, decode: Member) -> bool:
        """Return whether an interrupted stream should go on at the instance."""
        has_prefill = decode.info.own_prefill is None or self.has_prefill(decode)
        return has_prefill and (decode.is_clear(self.now_s) or self.takes_recovery(decode))

    def has_prefill(self, decode: Member) -> bool:
        """Return whether a prefill instance exists for the instance, which may accept hand-offs
        only from its own server's.
        """
        return (
            decode.info.own_prefill is None
            or decode.abilities.pulls
            or decode.info.own_prefill in self.members
        )

    def targets(self, name: str = "") -> list[Member]:
        """Return the healthy decode instances that serve this model name, least loaded first; if
        none is healthy, all that are not busy.
        """
        healthy: list[Member] = []
        possible: list[Member] = []
        for member in self.decoders:
            if (name and name not in member.abilities.names) or (
                member.info.own_prefill is not None and not self.has_prefill(member)
            ):
                continue
            if member.is_clear(self.now_s):
                healthy.append(member)
            elif self.is_busy(member):
                continue
            elif self.takes_recovery(member):
                healthy.append(member)
            possible.append(member)
        return healthy or possible

    def assume(self, assumed_link_bytes_per_s: float) -> None:
        """Change the assumed bandwidth of links that are not measured."""
        self.assumed_link = Link(assumed_link_bytes_per_s)
        for link in self.links.values():
            if not link.measured:
                link.bytes_per_s = assumed_link_bytes_per_s

    def link(self, source: NodeId, target: NodeId) -> Link:
        """Return the record of the link, which has the assumed rate until it is measured."""
        found = self.links.get((source, target))
        if found is None:
            found = self.links[source, target] = Link(self.assumed_link.bytes_per_s)
        return found

    def link_from(self, agent: Agent, target: NodeId) -> Link:
        """Return the link from an agent to a node's instances; within the agent's node, the copy
        from host memory once its rate was measured.
        """
        if agent.node == target and (memory := self.links.get((MEMORY, target))) is not None:
            return memory
        return self.link(agent.node, target)

    def restore_bytes_per_s(self, agent: Agent) -> float:
        """Return the rate from an agent's memory to the instances of its node: the measured rate,
        else the configured one.
        """
        memory = self.links.get((MEMORY, agent.node))
        return agent.host_to_device_bytes_per_s if memory is None else memory.bytes_per_s

    def bytes_per_s(self, source: NodeId, target: NodeId) -> float:
        return self.links.get((source, target), self.assumed_link).bytes_per_s

    def agent_on(self, node: NodeId) -> Agent | None:
        return next((agent for agent in self.agents.values() if agent.node == node), None)

    def queueing_delay_s(self, node: NodeId) -> float:
        """Return the queueing delay of a new stream at the node."""
        members = self.by_node.get(node, ())
        decoders = [member.queue_s for member in members if member.abilities.decodes]
        return min(decoders or [member.queue_s for member in members], default=0.0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "instances": [
                {
                    "id": member.id,
                    "node": member.node,
                    "role": member.role.value,
                    "epoch": member.epoch,
                    "queue_s": member.queue_s,
                    "work_s": member.work_s,
                    "running": len(member.running),
                    "decode_streams": member.streams - member.others_reported,
                    "others_reported": member.others_reported,
                    "retained_streams": len(member.held),
                    "drained": member.is_drained,
                    "health": {
                        **member.answers.snapshot(self.now_s),
                        "hung_transfer_s": max(0.0, member.hung_until_s - self.now_s),
                    },
                }
                for member in self.members.values()
            ],
            "agents": [
                {
                    "id": agent.id,
                    "node": agent.node,
                    "epoch": agent.epoch,
                    "capacity_bytes": agent.capacity_bytes,
                    "reserved_bytes": agent.reserved_bytes,
                    "checkpoints": agent.checkpoints,
                    "booked_bytes": agent.booked_bytes,
                    "own_streams": len(agent.streams),
                }
                for agent in self.agents.values()
            ],
            "links": [
                {
                    "source": source,
                    "target": target,
                    "bytes_per_s": link.bytes_per_s,
                    "measured": link.measured,
                    "in_flight_bytes": link.in_flight_bytes,
                }
                for (source, target), link in self.links.items()
            ],
        }

    def _set_ranked(self, member: Member, is_ranked: bool) -> None:
        if is_ranked:
            insort(self.decoders, member, key=_rank)
        else:
            self.decoders.remove(member)
        member.is_ranked = is_ranked


_rank = attrgetter("rank")


def _differ(formats: set[str]) -> bool:
    """Return whether two known hand-off formats differ; an empty format is unknown."""
    return len(formats - {""}) > 1


def agent_of(view: ClusterView, holder: InstanceId) -> Agent | None:
    """Return the agent or the store of this id; None: the holder is an instance."""
    return view.store if holder == view.store.id else view.agents.get(holder)


def have_roles_of(member: Member, others: Sequence[Member]) -> bool:
    """Return whether the other instances together have the roles of the member."""
    return (not member.abilities.prefills or any(each.abilities.prefills for each in others)) and (
        not member.abilities.decodes or any(each.abilities.decodes for each in others)
    )
