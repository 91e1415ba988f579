"""Pages come from a server's own region, the agent of its node or those of others, and from none
where what they give is not right.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvrs.engines.proof import PROMPTS, RowProofs
from kvrs.protocol.rows import Space
from kvrs.sglang.pages import LoadedPages, PageRegion, Pages
from kvrs.transfer.rows.client import RowClient
from kvrs_testkit.row_agent import SECRET, RowAgent, until
from kvrs_testkit.row_engine import RowEngine, key_of, row_of
from kvrs_testkit.row_relay import Relay

pytestmark = pytest.mark.network

SPACE = Space(bytes(31) + b"g", 8192)
KEYS = [key_of(number) for number in range(1, 9)]
PAGES = [row_of(key, SPACE.row_bytes) for key in KEYS]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[RowAgent]]:
    """Those of the own node and of two others."""
    agents = [RowAgent(tmp_path / f"rows {number}") for number in range(3)]
    yield agents
    for agent in agents:
        agent.close()


@pytest.fixture
def engine_at(agents: list[RowAgent]) -> Iterator[Callable[[int, Sequence[int]], RowEngine]]:
    """Lets the agent of that number hold the pages of an engine."""
    engines = []

    def engine(agent: int, numbers: Sequence[int]) -> RowEngine:
        made = RowEngine(agents[agent].path, SECRET, SPACE.namespace, len(numbers), SPACE.row_bytes)
        for row, number in enumerate(numbers):
            made.write(row, number)
        made.link.start()
        until(lambda: bool(agents[agent].regions.of(SPACE)))
        engines.append(made)
        return made

    yield engine
    for each in engines:
        each.link.close()


@pytest.fixture
def clients(agents: list[RowAgent]) -> list[RowClient]:
    own, *others = agents
    return [own.client(SPACE), *(each.client(SPACE, each.tcp) for each in others)]


@pytest.fixture
def held(clients: list[RowClient]) -> Iterator[Pages]:
    region, proofs = PageRegion(len(KEYS), SPACE.row_bytes), RowProofs(torch.float32)
    held = Pages(region, clients, proofs, 5.0, 5.0)
    yield held
    held.close()


def load(held: Pages) -> tuple[LoadedPages, list[bytes]]:
    loaded = dict[int, bytes]()
    found = held.load(KEYS, lambda at, row: loaded.__setitem__(at, bytes(row)))
    return found, [loaded[at] for at in range(len(loaded))]


def keep(held: Pages, at: int) -> None:
    def fill(row: memoryview) -> None:
        row[:] = PAGES[at]

    held.region.put(KEYS[at], fill)


def test_pages_come_from_wherever_they_are(
    held: Pages, engine_at: Callable[[int, Sequence[int]], RowEngine]
) -> None:
    """Two in the own region, two at the own agent, one at each of the others."""
    keep(held, 0)
    keep(held, 5)
    engine_at(0, [2, 3])
    engine_at(1, [4])
    engine_at(2, [5])
    assert held.count(KEYS) == 6
    assert load(held) == (LoadedPages(own=2, agents=4), PAGES[:6])


def test_what_agents_gave_is_in_the_own_region_afterwards(
    held: Pages,
    engine_at: Callable[[int, Sequence[int]], RowEngine],
    agents: list[RowAgent],
) -> None:
    """They may give a dead engine's memory back."""
    engine_at(1, range(1, 9))
    assert load(held) == (LoadedPages(agents=8), PAGES)
    for agent in agents:
        agent.close()
    assert held.count(KEYS) == 8
    assert load(held) == (LoadedPages(own=8), PAGES)


def test_own_pages_are_read_without_asking_an_agent(held: Pages) -> None:
    for at in range(3):
        keep(held, at)
    held._threads.shutdown()
    assert held.count(KEYS[:3]) == 3
    assert held.load(KEYS[:3], lambda at, row: None) == LoadedPages(own=3)


def test_without_agents_own_pages_are_there(held: Pages, agents: list[RowAgent]) -> None:
    for agent in agents:
        agent.close()
    keep(held, 0)
    assert held.count(KEYS) == 1
    assert load(held) == (LoadedPages(own=1), PAGES[:1])


def test_a_damaged_page_is_a_miss_and_so_is_all_behind_it(
    held: Pages, engine_at: Callable[[int, Sequence[int]], RowEngine]
) -> None:
    """Its tag was made when the row first left its node."""
    engine = engine_at(1, range(1, 9))
    assert load(held)[0] == LoadedPages(agents=8)
    engine.spoil(row=2)
    held.region.clear()
    assert load(held) == (LoadedPages(agents=2), PAGES[:2])
    assert held.region.held(KEYS[:3]) == [True, True, False]


def test_a_page_that_is_torn_is_a_miss(
    held: Pages, engine_at: Callable[[int, Sequence[int]], RowEngine]
) -> None:
    """Its engine died as it wrote it."""
    engine = engine_at(1, range(1, 9))
    engine.ledger.writing(3)
    assert held.count(KEYS) == 3
    assert load(held) == (LoadedPages(agents=3), PAGES[:3])


def test_an_agent_that_hangs_hides_nothing_of_the_others(
    held: Pages,
    clients: list[RowClient],
    engine_at: Callable[[int, Sequence[int]], RowEngine],
) -> None:
    """It is left out for a while."""
    engine_at(1, range(1, 9))
    engine_at(2, range(1, 9))
    relay = Relay(clients[1]._dial)
    relay.stop_in, clients[1]._dial = 0, relay.connect
    held._lookup_s = 0.2
    assert load(held) == (LoadedPages(agents=8), PAGES)
    assert not clients[1].is_usable
    relay.close()


def test_an_agent_that_hangs_in_a_load_is_a_miss(
    held: Pages,
    clients: list[RowClient],
    engine_at: Callable[[int, Sequence[int]], RowEngine],
) -> None:
    engine_at(1, range(1, 9))
    relay = Relay(clients[1]._dial)
    relay.stop_in, clients[1]._dial = 3 * SPACE.row_bytes, relay.connect
    held._load_s = 0.5
    found, loaded = load(held)
    assert found.pages == len(loaded) < 3
    assert loaded == PAGES[: len(loaded)]
    relay.close()


def test_a_page_in_so_many_prompts_is_left_to_be_computed(
    held: Pages, engine_at: Callable[[int, Sequence[int]], RowEngine]
) -> None:
    """The last one, whose bytes at the agent are kept until it is. Prompts whose last page is the
    server's own do not count: there is nothing to prove.
    """
    engine_at(1, [1, 2, 3])
    keep(held, 3)

    own = [held.count(KEYS[3:4]) for _ in range(PROMPTS)]
    counts = [held.count(KEYS[:3]) for _ in range(PROMPTS)]

    assert own == [1] * PROMPTS
    assert counts == [*[3] * (PROMPTS - 1), 2]
    assert held.proofs.due(KEYS[:2]) is None
    assert held.proofs.due(KEYS) == (2, bytearray(PAGES[2]))
    assert held.proofs.due(KEYS) is None
