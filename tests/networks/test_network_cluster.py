"""The networks themselves: what other tests rely on, and that nothing is left behind."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvrs_testkit.networks import PREFIX, Network, sweep

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("networks"),
    pytest.mark.nightly,
]

LEFT = """
import os, subprocess
from kvrs_testkit.networks import Network
network = Network("n0")
network.__enter__()
sleep = network.command_at("n0", "sleep", "600")
print(subprocess.Popen(sleep, stdout=subprocess.DEVNULL).pid, flush=True)
os._exit(1)
"""


def _namespaces_of(pid: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"{PREFIX}-{pid}-*")]


def test_networks_of_a_killed_test_are_removed_by_the_next_one(possible: None) -> None:
    """Namespaces and the processes in them; those of running tests stay."""
    with Network("n0") as network:
        killed = subprocess.Popen([sys.executable, "-c", LEFT], stdout=subprocess.PIPE, text=True)
        output, _ = killed.communicate(timeout=60)
        left = _namespaces_of(killed.pid)

        sweep()

        assert len(left) == 3
        assert _namespaces_of(killed.pid) == []
        assert (
            not Path(f"/proc/{int(output)}/cmdline").exists()
            or not Path(f"/proc/{int(output)}/cmdline").read_bytes()
        )
        assert Path(f"/run/netns/{network.namespace('n0')}").exists()
    assert _namespaces_of(os.getpid()) == []


def test_a_blocked_direction_is_blocked_in_one_direction_and_healed(possible: None) -> None:
    """Every test of a partition relies on it."""
    with Network("n0", "n1") as network:
        sockets = {}
        for name in network.names:
            with network.at(name) as address:
                sockets[name] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                sockets[name].bind((address, 7))
                sockets[name].settimeout(2.0)

        def arrives(source: str, target: str) -> bool:
            sockets[source].sendto(b"?", (network.addresses[target], 7))
            try:
                return sockets[target].recv(1) == b"?"
            except TimeoutError:
                return False

        network.block("n0", "n1")
        blocked = arrives("n0", "n1"), arrives("n1", "n0")
        network.heal()
        healed = arrives("n0", "n1"), arrives("n1", "n0")
        for each in sockets.values():
            each.close()

    assert (blocked, healed) == ((False, True), (True, True))
