"""The same experiment with the pure core compiled by mypyc, in a third of the time: same source,
same objects.

    python -m experiments.gossip_detection.compiled --rows hours --budget-s 6000

The arguments are those of `run`.

The build is in a temporary folder. A check before the runs shows that compiling changes nothing:
the same seeds have to give the same events at the same times, to the last bit. Modules with
messages, settings or facts stay interpreted, because msgspec and pydantic make their classes.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.gossip_detection.chunks import NODES
from experiments.gossip_detection.clusters import joined
from experiments.record import COMMIT_ENV, ROOT, commit_of
from kvrs.config.gossip import GossipSettings
from kvrs.gossip.events import Event
from kvrs.sim.gossip import SimNode
from kvrs_testkit.gossip_chaos import ChaosNetwork

NEEDED = ("kvrs", "experiments/gossip_detection", "tests/gossip")
_GOSSIP = ("detector", "exchange", "members", "node", "piggyback", "prober", "probes", "records")
CORE = (
    *(f"kvrs/gossip/{name}.py" for name in (*_GOSSIP, "sender", "suspicion")),
    "kvrs/sim/gossip.py",
)
_STORMS = 40
_MINUTES = 5.0


def fingerprint() -> str:
    """Hash of every event of some storms and of a large cluster with loss: when, where, what."""
    digest = hashlib.sha256()

    def observe(now_s: float, node: SimNode, event: Event) -> None:
        digest.update(repr((now_s, node.id, event)).encode())

    for seed in range(_STORMS):
        chaos = ChaosNetwork(seed, observe)
        chaos.run_with_faults(12)
        chaos.run_without_faults(40.0)
        digest.update(
            repr(
                [(node.id, node.sent_packets, node.sent_bytes) for node in chaos.net.nodes.values()]
            ).encode()
        )
    net = joined(NODES, 0, GossipSettings(), observer=observe)
    net.loss = 0.2
    net.run(net.now_s + _MINUTES * 60)
    digest.update(repr((net.delivered, net.random.random())).encode())
    return digest.hexdigest()


def build(folder: Path) -> None:
    for needed in NEEDED:
        shutil.copytree(
            ROOT / needed, folder / needed, ignore=shutil.ignore_patterns("__pycache__", "results")
        )
    shutil.copy(ROOT / "experiments/record.py", folder / "experiments")
    environment = {**os.environ, "MYPYC_OPT_LEVEL": "3"}
    made = subprocess.run(
        [sys.executable, "-m", "mypyc", *CORE],
        cwd=folder,
        env=environment,
        check=False,
        text=True,
        capture_output=True,
    )
    if made.returncode:
        raise SystemExit(f"mypyc:\n{made.stdout}{made.stderr}")


def fingerprint_in(folder: Path) -> tuple[str, str]:
    """The value of `is_compiled()` there, and the fingerprint."""
    script = (
        "from experiments.gossip_detection import chunks, compiled; "
        "print(chunks.is_compiled(), compiled.fingerprint())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, check=True, text=True, capture_output=True
    )
    compiled, printed = done.stdout.split()
    return compiled, printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    known, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        (here, expected), (there, found) = fingerprint_in(ROOT), fingerprint_in(folder)
        if (here, there) != ("False", "True") or found != expected:
            raise SystemExit(f"compiled: {here} and {there}; what came out: {expected} and {found}")
        print(f"interpreted and compiled: the same events ({found[:16]})", flush=True)
        command = [
            sys.executable,
            "-m",
            "experiments.gossip_detection.run",
            "--out",
            str(known.out.resolve()),
            *others,
        ]
        environment = os.environ | {COMMIT_ENV: commit_of(ROOT)}
        run = subprocess.Popen(command, cwd=folder, env=environment)
        signal.signal(signal.SIGTERM, lambda number, _: run.send_signal(number))
        return run.wait()


if __name__ == "__main__":
    raise SystemExit(main())
