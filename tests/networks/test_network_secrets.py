"""The cluster's secret among real agents: who does not have it, and how it is exchanged."""

from tests.networks.agents_on_hosts import SECRET, AgentsOnHosts

NEW = "another secret, long enough as well"


def test_a_secret_is_exchanged_without_a_gap_and_who_has_another_one_never_gets_in(possible: None) -> None:
    """Appended everywhere, then moved to the front, then alone: at every step all are members of all, and nobody dies of it. The
    packets of the stranger are counted.
    """
    with AgentsOnHosts(4) as agents:
        ours = agents.names[:3]
        agents.rings["n3"] = ("the secret of other people, also long",)
        for name in agents.names:
            agents.start(name)
        agents.wait_ready()
        agents.settle(ours)

        for ring in ((SECRET, NEW), (NEW, SECRET), (NEW,)):
            for name in ours:
                agents.rings[name] = ring
                agents.leave(name)
                agents.start(name)
                agents.settle(ours)
        agents.until(lambda: all(agents.members(name)["dropped"].get("key") for name in ours))
        shown = {name: agents.members(name) for name in agents.names}

    assert agents.watch.deaths == []
    for name in ours:
        assert {row["id"]: row["status"] for row in shown[name]["members"]} == dict.fromkeys(ours, "alive")
    assert [row["id"] for row in shown["n3"]["members"]] == ["n3"]
