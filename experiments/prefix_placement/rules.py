"""Rules that place a prompt, put in place of `kvrs.core.prefix_routing.with_prefix`.

Those of other routers are written here from their published descriptions, with their default
parameters. All of them see the same index of prefixes, which has no more than the caches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kvrs.core import prefix_routing, routing
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.recovery import RecoveryPolicy
from kvrs.protocol.pages import Tag, page_tags, root_tag
from kvrs_lab.sim.streams import SimStream
from kvrs_lab.sim.world import World

# SGLang's router, policy `cache_aware`: docs/getting-started/load-balancing.md of lightseekorg/smg.
CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5
# llm-d's endpoint picker: weights of its default scheduling profile; prefix plugin of
# gateway-api-inference-extension: at most so many blocks of the engine's size are matched.
PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT, MOST_BLOCKS = 3.0, 2.0, 2.0, 256

Rule = Callable[..., Member]


def _depths(view: ClusterView, stream: Stream) -> dict[Member, int]:
    """Cached tokens of the prompt at each prefill instance, by the index."""
    found = dict.fromkeys(view.prefillers, 0)
    for blocks, mask in view.prefixes.levels(stream.prefix):
        tokens = stream.prefix.tokens(blocks, stream.prompt_tokens)
        found |= {member: tokens for member in view.prefillers if member.cache_bit & mask}
    return found


def _chosen(stream: Stream, member: Member, depths: dict[Member, int]) -> Member:
    stream.cached = {member.id: depths[member]} if depths[member] else {}
    return member


def cache_aware(view: ClusterView, stream: Stream, *_: object) -> Member:
    """SGLang's: the longest match where loads are even, else the least loaded instance."""
    depths = _depths(view, stream)
    loads = {member: member.bookings for member in depths}
    least, most = min(loads.values()), max(loads.values())
    if most - least > BALANCE_ABS and most > BALANCE_REL * least:
        return _chosen(stream, min(depths, key=lambda each: (loads[each], each.id)), depths)
    best = max(depths, key=lambda each: (depths[each], -loads[each]))
    if depths[best] > CACHE_THRESHOLD * stream.prompt_tokens:
        return _chosen(stream, best, depths)
    # The smallest tree: the instance with the fewest cached blocks.
    caches = view.prefixes._caches
    sizes = {each: len(caches[each.id].order) if each.id in caches else 0 for each in depths}
    return _chosen(
        stream, min(depths, key=lambda each: (sizes[each], loads[each], each.id)), depths
    )


def scored(view: ClusterView, stream: Stream, *_: object) -> Member:
    """llm-d's: a weighted sum of the matched share, the queue and the free KV."""
    depths = _depths(view, stream)
    # A simulated engine admits all that it has pages for, so that what is in flight is the queue.
    queues = {member: member.bookings for member in depths}
    least, most = min(queues.values()), max(queues.values())
    scores = {}
    for member, tokens in depths.items():
        size = member.abilities.page_size_tokens
        blocks = max(1, min(MOST_BLOCKS, stream.prompt_tokens // size))
        matched = min(MOST_BLOCKS, tokens // size) / blocks
        queue = (most - queues[member]) / (most - least) if most > least else 1.0
        load, pages = member.load, max(1, view_pages(member))
        free = 1.0 if load is None else load.free_pages / pages
        scores[member] = PREFIX_WEIGHT * matched + QUEUE_WEIGHT * queue + KV_WEIGHT * free
    best = max(depths, key=lambda each: (scores[each], -queues[each]))
    return _chosen(stream, best, depths)


def view_pages(member: Member) -> int:
    """The pages of an instance: as many as were ever free."""
    load = member.load
    free = 0 if load is None else load.free_pages
    _PAGES[member.id] = max(_PAGES.get(member.id, 0), free)
    return _PAGES[member.id]


_PAGES: dict[str, int] = {}  # Of one world.


def _true_levels(world: World) -> Callable[..., tuple[int, list[tuple[int, list[Member]]]]]:
    """The pages that simulated instances really hold at the moment, in place of the index."""
    tags: dict[str, list[Tag]] = {}

    def levels(
        view: ClusterView, stream: Stream, first: Member
    ) -> tuple[int, list[tuple[int, list[Member]]]]:
        assert isinstance(stream, SimStream)
        size = first.abilities.page_size_tokens
        if stream.id not in tags:
            tags[stream.id] = page_tags(
                root_tag("simulated"), stream.journal.arrival.prompt_ids, size
            )
        found: dict[int, list[Member]] = {}
        own = 0
        for member in sorted(view.prefillers, key=lambda each: (each.queue_s, each.id)):
            pages, count = world.cluster.engines[member.id].pages, 0
            for tag in tags[stream.id]:
                if not pages.holds(tag):
                    break
                count += 1
            tokens = min(count * size, stream.prompt_tokens - 1)
            if member is first:
                own = tokens
            elif tokens:
                found.setdefault(tokens, []).append(member)
        return own, [(tokens, found[tokens]) for tokens in sorted(found) if tokens > own]

    return levels


@contextmanager
def placed_by(rule: str, world: World) -> Iterator[None]:
    """Prompts of the world are placed by the rule: one of `RULES`, or `OWN_INDEX`."""
    _PAGES.clear()
    if rule == "true contents":
        with patch.object(prefix_routing, "_levels", _true_levels(world)):
            yield
    elif rule in _OTHERS:
        with patch.object(routing, "with_prefix", _OTHERS[rule]):
            yield
    elif rule == OWN_INDEX:
        with patch.object(RecoveryPolicy, "sent_elsewhere", lambda *_: None):
            yield
    else:
        yield


_OTHERS: dict[str, Rule] = {"cache_aware": cache_aware, "llm-d": scored}
OWN_INDEX = "prefix, own"  # Proxies that do not tell each other what they have sent.
RULES = ("load", "prefix", "true contents", *_OTHERS)
