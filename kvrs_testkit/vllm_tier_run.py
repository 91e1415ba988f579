"""vLLM's own tiering manager with the kvrs tier before agents by script: prompts are looked up and
loaded as its scheduler does, and each method of policy and tier fails once.

Runs in vLLM's interpreter: `python -m kvrs_testkit.vllm_tier_run` prints a line of JSON.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvrs.engines import proof
from kvrs.protocol.rows import PARAMS_FIELD, seal
from kvrs.transfer.rows.client import RowClient
from kvrs.vllm import adapters, ledger, node, tier
from kvrs.vllm.agents import KnownAgents

ROW_BYTES = 4096
STEPS = 400
KEYS = b"k" * 32, b"older" * 8  # While a secret is rotated.
NUMBERS = [*range(1, 1 + ROW_BYTES // 4)]
GUARDED = (
    *("on_new_request", "on_request_finished", "lookup", "on_schedule_end", "_take_answers"),
    *("_hold", "_queue_load", "_queue_proof"),
)
LEDGER = ("writing", "holds")


def asking(*agents: Any, key: bytes = KEYS[0]) -> dict[str, Any]:
    """Parameters as a proxy makes them."""
    return {PARAMS_FIELD: msgspec.to_builtins(seal(agents, key, time.time()))}


ASKING = asking()


class Region:
    def __init__(self, rows: int) -> None:
        self.rows = np.zeros((rows, ROW_BYTES), np.int8)

    def create_kv_memoryview(self) -> memoryview:
        view: Any = self.rows
        return memoryview(view)

    def cleanup(self) -> None:
        pass


class Agent(RowClient):
    """Holds keys up to a number, and loads as many rows of a question as it is told to. It hangs
    for the whole time that it has, where that is asked for.
    """

    def __init__(
        self, name: str, most: int = 1 << 30, holds: int = 1 << 30, hangs: str = ""
    ) -> None:
        self.name, self.most, self.holds, self.hangs = name, most, holds, hangs
        self.loaded = 0
        self.row = np.array(NUMBERS, np.float32).tobytes()

    @property
    def is_usable(self) -> bool:
        return True

    def find(self, keys: Sequence[bytes], timeout_s: float) -> Sequence[bool]:
        if self.hangs == "find":
            time.sleep(timeout_s)
            return [False] * len(keys)
        return [int.from_bytes(key[:32], "big") < self.holds for key in keys]

    def load(self, wanted: Sequence[tuple[bytes, memoryview]], timeout_s: float) -> int:
        if self.hangs == "load":
            time.sleep(timeout_s)
            return 0
        count = min(len(wanted), self.most)
        self.loaded += count
        for _, row in wanted[:count]:
            row[:] = self.row
        return count

    def close(self) -> None:
        pass


class Link:
    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


class World:
    def __init__(
        self,
        rows: int,
        most: int = 1 << 30,
        *,
        all_: bool = False,
        holds: int = 1 << 30,
        others: Sequence[Agent] = (),
    ) -> None:
        self.agent = Agent("own", most, holds)
        self.region = Region(rows)
        agents = KnownAgents(self.agent, {each.name: each for each in others}, KEYS)
        primary = CPUPrimaryTierOffloadingManager(
            rows, self.region, "KvrsPolicy", "kvrs.vllm.ledger"
        )
        policy = ledger.latest()
        assert policy is not None
        self.policy = policy
        link: Any = Link()
        node.of_tier = lambda *_: node.NodeParts(
            link, policy, agents, all_, torch.float32, 0.3, 0.5
        )
        self.tier = tier.KvrsTier(None, primary.get_kv_memoryview(), "KvrsTier")
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.requests, self.protects = 0, False

    def request(
        self,
        keys: int,
        params: Any = ASKING,
        *,
        is_told: bool = True,
        computed: bytes | None = None,
    ) -> tuple[int, int]:
        """Look a prompt up until all its keys are decided: steps, and keys that were there.
        `is_told`: by the connector, which knows its adapter. `computed`: what the engine then makes
        of the first key that was not there.
        """
        self.requests += 1
        context = ReqContext(f"r{self.requests}", params)
        if is_told:
            adapters.begin(None)
        self.manager.on_new_request(context)
        self.protects = bool(self.tier._protected)
        adapters.end()
        wanted = [make_offload_key(n.to_bytes(32, "big"), 0) for n in range(keys)]
        for step in range(STEPS):
            found, waits = 0, False
            for key in wanted:
                result = self.manager.lookup(key, context)
                waits |= result in {LookupResult.HIT_PENDING, LookupResult.RETRY}
                if result is LookupResult.MISS:
                    break
                found += result is not LookupResult.RETRY
            self.manager.on_schedule_end(ScheduleEndContext([], []))
            if not waits:
                if computed is not None:
                    while self.tier._proofs._theirs is None:
                        time.sleep(0.002)
                    self._compute(wanted[found], context, computed)
                self.manager.on_request_finished(context)
                return step, found
            time.sleep(0.002)
        raise AssertionError(f"a prompt of {keys} keys was not decided in {STEPS} steps")

    def _compute(self, key: Any, context: ReqContext, row: bytes) -> None:
        stored = self.manager.prepare_store([key], context)
        assert stored is not None
        (place,) = stored.store_spec.chunk_ids
        self.region.rows[place] = np.frombuffer(row, np.int8)
        self.manager.complete_store([key], context)
        give_up_s = time.monotonic() + 10
        while self.tier.has_pending_work() and time.monotonic() < give_up_s:
            self.manager.on_schedule_end(ScheduleEndContext([], []))
            time.sleep(0.002)
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def end(self) -> None:
        self.manager.shutdown()


def with_others(said: dict[str, Any]) -> None:
    """Prompts of six keys, of which the own agent holds four."""
    for name, others, agents in (
        ("another has the rest", [Agent("b")], ["b"]),
        ("another has them too", [Agent("b", holds=4)], ["b", "own", "b"]),
        ("another hangs at a lookup", [Agent("b", hangs="find")], ["b"]),
        ("another hangs in a load", [Agent("b", hangs="load")], ["b"]),
        ("another hangs, and one has the rest", [Agent("b"), Agent("c", hangs="find")], ["c", "b"]),
        ("another is not named", [Agent("b")], []),
    ):
        world = World(8, holds=4, others=others)
        if len(others) > 1:
            world.tier._lookup_s = 3.0  # Far more than the steps of a prompt may take.
        found = world.request(6, asking(*agents))[1]
        said[name] = [found, world.agent.loaded, others[0].loaded]
        world.end()
    for name, all_, params in (
        ("a client names another", False, {"kvrs": {"agents": ["b"]}}),
        ("a client names another to one that serves all", True, {"kvrs": {"agents": ["b"]}}),
        ("the key is that of another server", False, asking("b", key=b"x" * 32)),
        ("the key is the older one", False, asking("b", key=KEYS[1])),
        ("agents are no names", False, asking(["b"], 7)),
        ("surrogates", False, {"kvrs": ASKING["kvrs"] | {"agents": ["\ud800"]}}),
        ("a million agents", False, {"kvrs": ASKING["kvrs"] | {"agents": ["b"] * 1_000_000}}),
    ):
        world = World(8, all_=all_, holds=4, others=[other := Agent("b")])
        found = world.request(6, params)[1]
        said[name] = [found, world.agent.loaded, other.loaded, world.protects]
        assert world.tier.switch.off_reason is None
        world.end()


def failing(owner: Any, name: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{name} failed")

    setattr(owner, name, fail)


def main() -> None:
    said: dict[str, Any] = {}
    for name, rows, keys, most in (
        ("room", 8, 6, 99),
        ("no room", 8, 12, 99),
        ("some are gone", 8, 6, 4),
        ("none is there", 8, 6, 0),
    ):
        world = World(rows, most)
        said[name] = world.request(keys)[1]
        world.end()
    for name, all_, params in (
        ("nobody asked", False, None),
        ("all are served", True, None),
        ("params are no object", False, ["kvrs"]),
        ("kvrs is no object", False, {"kvrs": True}),
        ("another connector brings it", True, {"do_remote_prefill": True}),
    ):
        world = World(8, all_=all_)
        said[name] = world.request(4, params)[1]
        world.end()
    with_others(said)
    proof.PROMPTS = 2
    for name, factor in (("a row is proved", 1.01), ("a row is refuted", -1.0)):
        world = World(16)
        row = (np.array(NUMBERS, np.float32) * factor).tobytes()
        said[name] = [world.request(4)[1], world.request(8, computed=row)[1]]
        said[name] += [world.tier.switch.off_reason, world.request(10)[1]]
        # Agents are served none of its rows either, once it is off.
        assert (world.policy.ledger is None) == (world.tier.switch.off_reason is not None)
        world.end()
    proof.PROMPTS = 1000
    world = World(8)
    said["its adapter is not known"] = world.request(4, is_told=False)[1]
    world.end()
    world = World(8)
    world.request(4)
    world.manager.reset_cache()
    said["after a reset"] = world.request(4)[1]
    assert world.policy.ledger is None
    world.end()
    for name in GUARDED:
        world = World(8)
        with failing_inside(getattr(tier.KvrsTier, name)):
            said[f"{name} fails"] = world.request(4)[1]
        world.manager.reset_cache()
        world.end()
    for name in ("find", "load"):
        world = World(8)
        failing(world.agent, name)
        said[f"{name} fails"] = world.request(4)[1]
        world.end()
    for name in LEDGER:
        world = World(8)
        failing(world.policy.ledger, name)
        said[f"{name} fails"] = world.request(4)[1]
        world.end()
    print(json.dumps(said))


@contextmanager
def failing_inside(method: Any) -> Iterator[None]:
    """Let what a guard calls fail."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{method.__name__} failed")

    (cell,) = (
        cell
        for name, cell in zip(method.__code__.co_freevars, method.__closure__, strict=True)
        if name == "hook"
    )
    hook, cell.cell_contents = cell.cell_contents, fail
    try:
        yield
    finally:
        cell.cell_contents = hook


if __name__ == "__main__":
    main()
