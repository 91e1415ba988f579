"""The page manager against a slow and obvious model of it, over random histories."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrs.ids import StreamId
from kvrs.protocol.pages import Tag, page_tags, root_tag
from kvrs_engine.scheduling.pages import PageManager
from kvrs_testkit.examples import examples

P = 4
# Runs of pages, some with a common beginning of two pages.
FAMILIES = [
    page_tags(root_tag("model"), [0] * P * shared + [family] * P * 6, P)[:6]
    for family in (1, 2, 3)
    for shared in (0, 2)
]


@dataclass
class ModelLease:
    pages: list[int]
    until_s: float
    tokens: int


@dataclass
class Model:
    """Lists and linear searches, nothing else."""

    total: int
    pins: dict[int, int] = field(default_factory=dict)
    tags: dict[int, Tag] = field(default_factory=dict)
    lru: list[int] = field(default_factory=list)
    leases: dict[StreamId, ModelLease] = field(default_factory=dict)
    # Tag and missing cells.
    damaged: dict[int, tuple[Tag, frozenset[tuple[int, int]]]] = field(default_factory=dict)
    mended: set[int] = field(default_factory=set)  # Of them, since the last loss.
    most_replicas: int = 0
    # Pages of replicas as they came, by stream, the one that was quiet for longest first.
    replicas: dict[StreamId, list[int]] = field(default_factory=dict)

    def leased(self, page: int) -> bool:
        return any(page in lease.pages for lease in self.leases.values())

    @property
    def known(self) -> set[int]:
        return {*self.tags, *self.damaged}

    def free(self) -> list[int]:
        return [
            page
            for page in range(self.total)
            if page not in self.pins and page not in self.known and not self.leased(page)
        ]

    def cached(self) -> list[int]:
        return [
            page
            for page in self.lru
            if page in self.known and page not in self.pins and not self.leased(page)
            if not self.is_replica(page)
        ]

    def is_replica(self, page: int) -> bool:
        return any(page in pages for pages in self.replicas.values())

    def idle(self) -> dict[StreamId, list[int]]:
        """Replicas without a pin."""
        return {
            stream: [page for page in pages if page in self.known and page not in self.pins]
            for stream, pages in self.replicas.items()
        }

    def touch(self, pages: list[int]) -> None:
        """Those pages lost a pin, in this order."""
        for page in pages:
            if page not in self.pins and not self.leased(page):
                if self.is_replica(page) and page in self.known:
                    continue
                self.no_replica(page)
                if page in self.lru:
                    self.lru.remove(page)
                self.lru.append(page)

    def no_replica(self, page: int) -> None:
        for stream, pages in [*self.replicas.items()]:
            if page in pages:
                pages.remove(page)
                if not pages:
                    del self.replicas[stream]

    def pin(self, page: int) -> None:
        self.pins[page] = self.pins.get(page, 0) + 1
        self.no_replica(page)

    def victim(self, besides: StreamId | None = None) -> int | None:
        for stream, pages in self.idle().items():
            if stream != besides and pages:
                return pages[-1]
        return None

    def forget(self, page: int) -> None:
        self.no_replica(page)
        self.tags.pop(page, None)
        self.damaged.pop(page, None)

    def unpin(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.pins[page] -= 1
            if not self.pins[page]:
                del self.pins[page]
                self.touch([page])

    def end_lease(self, key: StreamId) -> None:
        self.touch(self.leases.pop(key).pages[::-1])

    def evict_one(self) -> None:
        """Make one page free if none is."""
        while not self.free():
            if (page := self.victim()) is not None:
                self.forget(page)
                continue
            if self.cached():
                self.forget(self.cached()[0])
                continue
            key = min(self.leases, key=lambda key: self.leases[key].until_s)
            page = self.leases[key].pages.pop()
            if not self.leases[key].pages:
                del self.leases[key]
            self.touch([page])


class PagesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.owned: list[
            list[int]
        ] = []  # Runs with a hard pin each, as sequences and senders hold them.

    @initialize(total=st.integers(2, 14), most=st.integers(0, 6))
    def start(self, total: int, most: int) -> None:
        self.pages = PageManager(total, P)
        self.pages.replicas.most = most
        self.model = Model(total, most_replicas=most)

    @rule(
        stream=st.sampled_from([StreamId("x"), StreamId("y"), StreamId("z")]),
        family=st.sampled_from(FAMILIES),
        span=st.sampled_from([range(3), range(1, 5), range(6)]),
        arrives=st.sampled_from(["whole", "whole", "late", "never"]),
    )
    def bring_replicas(
        self, stream: StreamId, family: list[Tag], span: range, arrives: str
    ) -> None:
        for index in span:
            self._bring(stream, family[index], arrives)

    def _bring(self, stream: StreamId, tag: Tag, arrives: str) -> None:
        model, free = self.model, self.model.free()
        got = self.pages.allocate_replica(stream)

        expected: int | None
        if sum(map(len, model.replicas.values())) >= model.most_replicas:
            expected = model.victim(besides=stream)
        elif free:
            expected = got
            assert got in free
        else:
            expected = model.cached()[0] if model.cached() else None
        assert got == expected
        if got is None:
            return
        model.forget(got)
        model.pins[got] = 1
        model.replicas[stream] = [*model.replicas.pop(stream, []), got]
        if arrives != "never":
            known = [other for other, other_tag in model.tags.items() if other_tag == tag]
            assert self.pages.register(got, tag) == (known[0] if known else got)
            if not known:
                model.tags[got] = tag
        if arrives == "late":
            self.owned.append([got])
            return
        self.pages.release([got])
        model.unpin([got])

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        promised = self.model.total - len(self.model.pins)
        got = self.pages.allocate(count)

        assert (got is None) == (count > promised)
        if got is None:
            return
        assert len(set(got)) == count
        for _ in range(count):
            self.model.evict_one()
            # The manager may take any free page; the model follows it.
            page = next(page for page in got if page in self.model.free())
            self.model.pins[page] = 1
        self.owned.append(got)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), family=st.sampled_from(FAMILIES))
    def register(self, data: st.DataObject, family: list[Tag]) -> None:
        run = data.draw(st.sampled_from(self.owned))
        if any(page in self.model.known for page in run) or any(
            self.model.pins[page] > 1 for page in run
        ):
            return
        for page, tag in zip(run, family, strict=False):
            known = [other for other, other_tag in self.model.tags.items() if other_tag == tag]
            found = self.pages.register(page, tag)

            assert found == (known[0] if known else page)
            if not known:
                self.model.tags[page] = tag

    @rule(family=st.sampled_from(FAMILIES), length=st.integers(0, 6))
    def match(self, family: list[Tag], length: int) -> None:
        by_tag = {tag: page for page, tag in self.model.tags.items()}
        expected: list[int] = []
        for tag in family[:length]:
            if tag not in by_tag:
                break
            expected.append(by_tag[tag])

        assert self.pages.match(family[:length]) == expected
        for page in expected:
            self.model.pin(page)
        self.owned.append(expected)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.integers(0, len(self.owned) - 1)))

    def _release(self, number: int) -> None:
        run = self.owned.pop(number)

        self.pages.release(run)

        self.model.unpin(run)

    @precondition(lambda self: any(self.owned))
    @rule(
        data=st.data(),
        key=st.sampled_from("abcd"),
        partial=st.integers(1, P),
        lasts_s=st.integers(1, 20),
    )
    def retain(self, data: st.DataObject, key: str, partial: int, lasts_s: int) -> None:
        self._retain(
            data.draw(st.sampled_from([run for run in self.owned if run])), key, partial, lasts_s
        )

    def _retain(self, run: list[int], key: str, partial: int, lasts_s: int) -> None:
        until_s = self._unique_end(lasts_s)

        tokens = (len(run) - 1) * P + partial
        self.pages.retain(StreamId(key), run, tokens, until_s)

        for page in run:
            self.model.no_replica(page)
        old = self.model.leases.pop(StreamId(key), None)
        self.model.leases[StreamId(key)] = ModelLease(list(run), until_s, tokens)
        if old:
            self.model.touch(old.pages[::-1])

    @rule(
        count=st.integers(1, 4),
        key=st.sampled_from("abcd"),
        partial=st.integers(1, P),
        lasts_s=st.integers(1, 20),
    )
    def hand_off(self, count: int, key: str, partial: int, lasts_s: int) -> None:
        """Pages that only a lease keeps: of these there are few in other histories."""
        before = len(self.owned)
        self.allocate(count)
        if len(self.owned) > before:
            self._retain(self.owned[-1], key, partial, lasts_s)
            self._release(-1)

    @rule(keys=st.lists(st.sampled_from("abcd"), unique=True), lasts_s=st.integers(1, 20))
    def renew(self, keys: list[str], lasts_s: int) -> None:
        streams = [StreamId(key) for key in keys]
        for stream in streams:
            until_s = self._unique_end(lasts_s)
            unknown = self.pages.renew([stream], until_s)

            assert unknown == [stream for _ in range(stream not in self.model.leases)]
            if not unknown:
                self.model.leases[stream].until_s = max(until_s, self.model.leases[stream].until_s)

    @rule(keys=st.lists(st.sampled_from("abcd"), unique=True))
    def unretain(self, keys: list[str]) -> None:
        self.pages.unretain([StreamId(key) for key in keys])

        for key in keys:
            if key in self.model.leases:
                self.model.end_lease(StreamId(key))

    @rule(passes_s=st.integers(0, 15))
    def expire(self, passes_s: int) -> None:
        self.now_s += passes_s

        self.pages.expire(self.now_s)

        for key in sorted(self.model.leases, key=lambda key: self.model.leases[key].until_s):
            if self.model.leases[key].until_s <= self.now_s:
                self.model.end_lease(key)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def send_retained(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.leases)))
        page = data.draw(st.sampled_from(self.model.leases[key].pages))

        self.pages.pin(page)

        self.model.pin(page)
        self.owned.append([page])

    @rule()
    def reset(self) -> None:
        self.pages.reset_cache()

        self.model.leases.clear()
        self.no_replicas()
        self.model.tags = {
            page: tag for page, tag in self.model.tags.items() if page in self.model.pins
        }
        self.model.damaged = {
            page: tag for page, tag in self.model.damaged.items() if page in self.model.pins
        }

    @rule(
        lost=st.frozensets(st.tuples(st.just(0), st.integers(0, 2)), min_size=1),
        bases=st.sets(st.integers(0, 1), min_size=1),
    )
    def lose(self, lost: frozenset[tuple[int, int]], bases: set[int]) -> None:
        """Full pages are there for `mend`, with all cells gone that were lost since they were full;
        those that lose none are found as before.
        """

        def gone(page: int) -> frozenset[tuple[int, int]]:
            return lost if page % 2 in bases else frozenset()

        self.pages.lose(gone)

        for key in list(self.model.leases):
            self.model.end_lease(key)
        self.no_replicas()
        for page, tag in [*self.model.tags.items()]:
            if not gone(page):
                continue
            del self.model.tags[page]
            older = [other for other, known in self.model.damaged.items() if known[0] == tag]
            for other in older:
                del self.model.damaged[other]
            self.model.damaged[page] = tag, frozenset()
        self.model.damaged = {
            page: (tag, before | gone(page)) for page, (tag, before) in self.model.damaged.items()
        }
        self.model.mended.clear()

    @rule(family=st.sampled_from(FAMILIES), index=st.integers(0, 5))
    def mend(self, family: list[Tag], index: int) -> None:
        known = [
            (page, gone)
            for page, (tag, gone) in self.model.damaged.items()
            if tag == family[index] and not (page in self.model.mended and page in self.model.pins)
        ]

        assert self.pages.mend(family[index]) == (known[0] if known else None)
        for page, _ in known:
            self.model.mended.add(page)
            self.model.pin(page)
            self.owned.append([page])

    @precondition(lambda self: self.model.damaged)
    @rule(data=st.data(), cells=st.frozensets(st.tuples(st.just(0), st.integers(0, 2))))
    def bring(self, data: st.DataObject, cells: frozenset[tuple[int, int]]) -> None:
        page = data.draw(st.sampled_from(sorted(self.model.damaged)))

        self.pages.damaged.brought(page, cells)

        tag, gone = self.model.damaged[page]
        self.model.damaged[page] = tag, gone - cells
        assert self.pages.damaged.gone(page) == gone - cells

    @precondition(lambda self: self.model.damaged)
    @rule(data=st.data(), arrives=st.booleans())
    def end_mending(self, data: st.DataObject, arrives: bool) -> None:
        """It has come whole, or is about to be computed."""
        page = data.draw(st.sampled_from(sorted(self.model.damaged)))
        if page not in self.model.mended or page not in self.model.pins:
            return
        tag, _ = self.model.damaged.pop(page)
        if not arrives:
            self.pages.damaged.spoil(page)
            return
        known = [other for other, other_tag in self.model.tags.items() if other_tag == tag]
        assert self.pages.register(page, tag) == (known[0] if known else page)
        if not known:
            self.model.tags[page] = tag

    def no_replicas(self) -> None:
        """They are in the cache from now on, as those that were used last."""
        for page in [page for pages in self.model.idle().values() for page in pages]:
            if page in self.model.lru:
                self.model.lru.remove(page)
            self.model.lru.append(page)
        self.model.replicas.clear()

    def _unique_end(self, lasts_s: int) -> float:
        # Which of two leases with the same end shrinks first is not specified.
        until_s = self.now_s + lasts_s
        while any(lease.until_s == until_s for lease in self.model.leases.values()):
            until_s += 1 / 64
        return until_s

    @invariant()
    def books_agree(self) -> None:
        self.pages.check()
        assert self.pages.free_pages == self.model.total - len(self.model.pins)
        assert {
            page: tag for page, tag in enumerate(self.pages._tags) if tag is not None
        } == self.model.tags | {page: tag for page, (tag, _) in self.model.damaged.items()}
        assert list(self.pages._cached) == self.model.cached()
        replicas = self.pages.replicas
        assert len(replicas) <= self.model.most_replicas
        kept = [(stream, [*pages]) for stream, pages in replicas._pages.items()]
        assert kept == [*self.model.replicas.items()]
        idle = [page for _, pages in kept for page in pages if page in replicas]
        assert idle == [page for pages in self.model.idle().values() for page in pages]
        for key in "abcd":
            lease = self.model.leases.get(StreamId(key))
            intact = [
                self.pages.retained_page(StreamId(key), index)
                for index in range(len(lease.pages) + 1 if lease else 1)
            ]
            assert intact == [*(lease.pages if lease else []), None]
            tokens = min(lease.tokens, len(lease.pages) * P) if lease else 0
            assert self.pages.retained_tokens(StreamId(key)) == tokens


TestPages = PagesMachine.TestCase
TestPages.settings = examples(300, stateful_step_count=40)
