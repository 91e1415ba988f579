"""The state of a simulated process at its start: of its first life and of later ones."""

import msgspec

from kvrs.config.file import parse_config
from kvrs.ids import StreamId
from kvrs.profiles.catalog import kv_geometry
from kvrs.protocol.pages import CheckpointClaim, page_tags, root_tag
from kvrs_lab.sim.cluster import PACE, SimCluster

S, T = CheckpointClaim(StreamId("s"), 0, 1), CheckpointClaim(StreamId("t"), 0, 1)


def cluster() -> SimCluster:
    nodes = [{"id": "n0", "instances": [{"id": "w0", "role": "both"}]}]
    config = parse_config({"cluster": {"nodes": nodes}, "backup": {"mode": "local"}})
    return SimCluster(config, seed=0, proxies=1, stay_away=0.0, keep_log=False)


def test_an_instance_begins_its_first_life_with_what_was_made_with_it() -> None:
    """A second pool of pages would stay until garbage is collected, which is seldom."""
    found = cluster()
    (engine,) = found.engines.values()
    pages = engine.pages

    found.begin()
    in_its_first_life = engine.pages
    engine.kill()
    engine.start()

    assert in_its_first_life is pages
    assert engine.pages is not pages


def test_an_agent_that_restarts_adopts_whole_pages_by_their_age() -> None:
    """Not one that was being written; and none where its node was lost."""
    found = cluster()
    (agent,) = found.agents.values()
    found.begin()
    size = found.config.cluster.engine.page_size_tokens
    page_bytes = msgspec.structs.replace(kv_geometry(PACE), page_size_tokens=size).page_bytes
    slots = agent.book.capacity_slots
    tags = tuple(page_tags(root_tag("model"), range(slots), 1))
    agent.offer(S, slots * page_bytes, ())
    run = agent.begin(S, 0, tags)
    for index in reversed(range(slots)):
        agent.commit(run, index, tags[index])
    agent.end(run)

    agent.kill()
    agent.start()
    agent.offer(T, page_bytes, ())
    first_to_go = agent.begin(T, 0, tuple(page_tags(root_tag("other"), [1], 1))).slots
    agent.kill()
    agent.start()
    whole = agent.book.held_slots
    agent.kill()
    agent.lose_memory()
    agent.start()

    assert first_to_go == [slots - 1]
    assert whole == slots - 1 > 0
    assert agent.book.held_slots == 0
