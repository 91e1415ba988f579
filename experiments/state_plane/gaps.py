"""A stream of a cluster with one instance, which is killed: how long until the next token."""

import json
import os
import signal
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvrs.cluster.fault_injection import rows_of
from kvrs.cluster.launcher import Cluster
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId

ENGINE = InstanceId("e0")
TOKENS, BEFORE = 80, 20
WAIT_S = 120.0
# Tokens that are on their way at the kill arrive behind it.
ON_THEIR_WAY = 3


class Gap(NamedTuple):
    """Pauses of a stream with its instance killed, s: the one that the kill makes, the longest one
    after that, and the median time between two tokens before the kill.
    """

    at_kill_s: float
    later_s: float
    token_s: float


def config_of(model: Path, *, anchored: bool, instances: int = 1) -> Config:
    listed = [{"id": f"e{number}", "role": "both"} for number in range(instances)]
    return parse_config(
        {
            "cluster": {
                "model": str(model),
                "engine": {"pages": 64, "max_running": 4, "max_model_len": 512},
                "nodes": [{"id": "n0", "instances": listed}],
            },
            "proxy": {"port": 0, "admin_port": 0},
            "state_plane": {"enabled": anchored},
            # Streams wait for their instance, however long it takes.
            "policy": {"recovery": {"wait_s": WAIT_S}},
        }
    )


def gaps(model: Path, kills: int, *, anchored: bool, spared: bool) -> list[Gap]:
    """One of each kill; `spared`: the nursery and its spare live on."""
    found: list[Gap] = []
    with Cluster(config_of(model, anchored=anchored), lambda line: None) as cluster:
        first = _Stream(cluster, model.name)
        first.read()
        for _ in range(kills):
            _settle(cluster, anchored=anchored)
            stream = _Stream(cluster, model.name)
            reading = threading.Thread(target=stream.read)
            reading.start()
            _until(partial(stream.has, BEFORE))
            engine = _pid(cluster)
            victims = [engine] if spared else [_parent(engine), *_children(_parent(engine))]
            killed_s = time.monotonic()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            reading.join()
            if stream.ids != first.ids:
                raise RuntimeError("a stream went on differently")
            found.append(gap_of(stream.at_s, killed_s))
            cluster.wait_all_up(WAIT_S)
    return found


def memory(model: Path, instances: int) -> dict[str, Any]:
    """How much of the weights is in memory, by the share that each process has."""
    config = config_of(model, anchored=True, instances=instances)
    with Cluster(config, lambda line: None) as cluster:
        time.sleep(5)  # Spares load.
        rows = rows_of(cluster.state())
        pids = [int(rows[InstanceId(f"e{number}")]["pid"]) for number in range(instances)]
        pids += [pid for engine in pids for pid in _children(_parent(engine)) if pid != engine]
        shares = [_weights_of(pid) for pid in pids]
    size = max(size for _, size in shares)
    return {
        "processes": len(pids),
        "weights_bytes": size,
        "shares_bytes": sum(share for share, _ in shares),
        "copies": round(sum(share for share, _ in shares) / size, 3),
    }


class _Stream:
    def __init__(self, cluster: Cluster, model: str) -> None:
        body = {
            "model": model,
            "prompt": list(range(2, 42)),
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        self.at_s: list[float] = []
        self.ids: list[int] = []
        self._request = urllib.request.Request(  # noqa: S310 - our own URL
            f"{cluster.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )

    def has(self, tokens: int) -> bool:
        return len(self.at_s) >= tokens

    def read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=2 * WAIT_S) as answer:  # noqa: S310
            for line in answer:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                    self.ids += choice["token_ids"]
                    self.at_s.append(time.monotonic())


def gap_of(at_s: list[float], killed_s: float) -> Gap:
    """The gap in tokens received at these times, in order."""
    before = [at for at in at_s if at <= killed_s]
    after = at_s[len(before) :]
    pauses_s = [end - begin for begin, end in pairwise([killed_s, *after])]
    at_kill = max(range(ON_THEIR_WAY), key=pauses_s.__getitem__)
    return Gap(
        after[at_kill] - killed_s,
        max(pauses_s[at_kill + 1 :]),
        statistics.median(end - begin for begin, end in pairwise(before)),
    )


def _settle(cluster: Cluster, *, anchored: bool) -> None:
    """Until what was made again is there, and idle."""
    if anchored:
        _until(lambda: len(list(_children(_parent(_pid(cluster))))) >= 2)
    time.sleep(2)


def _until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > give_up_s:
            raise TimeoutError
        time.sleep(0.005)


def _pid(cluster: Cluster) -> int:
    return int(rows_of(cluster.state())[ENGINE]["pid"])


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _children(parent: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and _parent(int(entry.name)) == parent:
                yield int(entry.name)


def _weights_of(pid: int) -> tuple[int, int]:
    """A process's share of the mapped weights, and their size."""
    share, size, inside = 0, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if "-" in key and " " in key:
            inside = "/weights-" in line
        elif inside and key in ("Pss", "Size"):
            amount = int(value.split()[0]) * 1024
            share, size = (share + amount, size) if key == "Pss" else (share, size + amount)
    return share, size
