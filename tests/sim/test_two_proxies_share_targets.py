"""Several proxies recover at the same time, each with a view of its own."""

from typing import Any

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId, StreamId
from kvrs_lab.sim.cluster import SimCluster
from kvrs_lab.sim.proxy import SimProxy
from kvrs_lab.sim.streams import Arrival

MINE, THEIRS = 4, 12


def test_victims_keep_away_from_what_another_proxy_has_loaded() -> None:
    """LUMEN 4.3: the load of a target is what it runs and queues. One proxy has twelve streams at
    d1; the other one's victims of d0 all go to d2, where nothing runs.
    """
    nodes: list[dict[str, Any]] = [
        {"id": f"n{n}", "instances": [{"id": f"d{n}", "role": "decode"}]} for n in range(3)
    ]
    nodes[0]["instances"] += [{"id": "p0", "role": "prefill"}]
    engine = {"pages": 4096, "max_model_len": 4096}
    cluster = SimCluster(
        parse_config({"cluster": {"nodes": nodes, "engine": engine}}),
        seed=1,
        proxies=2,
        stay_away=0.0,
        keep_log=False,
    )
    clock, (own, other) = cluster.clock, cluster.serving

    def start(*started: str) -> None:
        for name in started:
            cluster.engines[InstanceId(name)].start()

    def arrive(proxy: SimProxy, prefix: str, count: int) -> list[StreamId]:
        streams = [StreamId(f"{prefix}{n}") for n in range(count)]
        for stream in streams:
            proxy.arrive(stream, Arrival(clock.now_s, tuple(range(100)), 2000))
        return streams

    for proxy in (own, other):
        proxy.begin()
    start("p0", "d1")
    clock.run(1.0)
    theirs = arrive(other, "theirs", THEIRS)
    clock.run(2.0)
    start("d0")
    clock.run(3.0)
    mine = arrive(own, "mine", MINE)
    clock.run(4.0)
    start("d2")
    clock.run(5.0)
    before = [own.streams[stream].instance for stream in mine]

    cluster.kill(cluster.engines[InstanceId("d0")], with_node=False)
    clock.run(6.0)

    assert [other.streams[stream].instance for stream in theirs] == ["d1"] * THEIRS
    assert before == ["d0"] * MINE
    assert [own.streams[stream].instance for stream in mine] == ["d2"] * MINE
