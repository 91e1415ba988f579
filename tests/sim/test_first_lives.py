"""The state of a simulated process at its start: of its first life and of later ones."""

from kvrs.config.file import parse_config
from kvrs.sim.cluster import SimCluster


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
