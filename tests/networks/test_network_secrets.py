"""The cluster's secret among real agents: rotation, and an agent with another secret."""

import pytest

from tests.networks.agents_on_hosts import SECRET, AgentsOnHosts

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("networks")]

NEW = "another secret, long enough as well"


def test_a_secret_is_rotated_without_a_gap_and_other_secrets_are_rejected(
    possible: None,
) -> None:
    """Appended everywhere, then moved to the front, then alone: at every step all are members
    of all, without deaths. Packets with the other secret are counted.
    """
    with AgentsOnHosts(4) as agents:
        members = agents.names[:3]
        agents.rings["n3"] = ("the secret of other people, also long",)
        for name in agents.names:
            agents.start(name)
        agents.wait_ready()
        agents.settle(members)

        for ring in ((SECRET, NEW), (NEW, SECRET), (NEW,)):
            for name in members:
                agents.rings[name] = ring
                agents.leave(name)
                agents.start(name)
                agents.settle(members)
        agents.until(lambda: all(agents.members(name)["dropped"].get("key") for name in members))
        shown = {name: agents.members(name) for name in agents.names}

    assert agents.watch.deaths == []
    for name in members:
        assert {row["id"]: row["status"] for row in shown[name]["members"]} == dict.fromkeys(
            members, "alive"
        )
    assert [row["id"] for row in shown["n3"]["members"]] == ["n3"]
