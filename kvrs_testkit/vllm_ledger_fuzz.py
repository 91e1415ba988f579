"""vLLM's own CPU tier under random stores, loads, failures and resets, with the kvrs policy: rows
that the ledger trusts are compared with what was copied into them.

Runs in vLLM's interpreter: `python -m kvrs_testkit.vllm_ledger_fuzz SEED STEPS ROWS`; prints a line
of JSON.
"""

import json
import random
import sys
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvrs.transfer.rows.ledger import LedgerView


class World:
    """The rows of a region as their contents: the key whose copy wrote them last, or None where a
    copy is under way. A copy writes at a random moment between its plan and its report.
    """

    def __init__(self, seed: int, rows: int) -> None:
        self.draw = random.Random(seed)
        self.manager = CPUOffloadingManager(rows, "KvrsPolicy", "kvrs.vllm.ledger")
        self.policy: Any = self.manager._policy
        self.ledger = self.policy.ledger
        self.view = LedgerView(self.ledger.descriptor)
        self.contents: list[bytes | None] = [None] * rows
        self.last: list[bytes] = [b""] * rows  # What a reader without the ledger believes.
        self.stores: list[tuple[list[bytes], list[int], ReqContext]] = []
        self.loads: list[tuple[list[bytes], ReqContext]] = []
        self.held: dict[str, set[bytes]] = {}  # Rows of protected streams, by request.
        self.counts = {"trusted": 0, "wrong": 0, "naive_wrong": 0, "evicted_too_soon": 0}
        self.requests = 0

    def key(self) -> bytes:
        return bytes(make_offload_key(self.draw.randrange(200).to_bytes(32, "big"), 0))

    def store(self) -> None:
        self.requests += 1
        context = ReqContext(str(self.requests))
        self.manager.on_new_request(context)
        keys = list({self.key() for _ in range(self.draw.randint(1, 6))})
        held = {key for keys in self.held.values() for key in keys}
        others = {key for key in self.policy._evictable if key not in held} - set(keys)
        plan = self.manager.prepare_store(keys, context)
        if plan is not None and others - set(plan.evicted_keys):
            self.counts["evicted_too_soon"] += len(held & set(plan.evicted_keys))
        if plan is not None and plan.keys_to_store:
            rows = [int(row) for row in plan.store_spec.chunk_ids]
            for key, row in zip(plan.keys_to_store, rows, strict=True):
                self.contents[row] = None  # From here on the copy may write.
                self.last[row] = key
            self.stores.append((list(plan.keys_to_store), rows, context))

    def end_store(self) -> None:
        if self.stores:
            keys, rows, context = self.stores.pop(self.draw.randrange(len(self.stores)))
            success = self.draw.random() < 0.9
            if success:
                for key, row in zip(keys, rows, strict=True):
                    self.contents[row] = key
            self.manager.complete_store(keys, context, success)
            self.manager.on_request_finished(context)

    def load(self) -> None:
        key = self.key()
        chunk = self.policy.get(key)
        if chunk is not None and chunk.is_ready:
            self.requests += 1
            context = ReqContext(str(self.requests))
            self.manager.on_new_request(context)
            self.manager.prepare_load([key], context)
            self.loads.append(([key], context))

    def end_load(self) -> None:
        if self.loads:
            keys, context = self.loads.pop(self.draw.randrange(len(self.loads)))
            self.manager.complete_load(keys, context)
            self.manager.on_request_finished(context)

    def hold(self) -> None:
        self.requests += 1
        request = f"protected {self.requests}"
        keys = {key for key in (self.key() for _ in range(4)) if key in self.policy.chunks}
        self.held[request] = keys
        self.policy.hold(request, keys)

    def release(self) -> None:
        if self.held:
            request = self.draw.choice(list(self.held))
            del self.held[request]
            self.policy.release(request)

    def compare(self) -> None:
        for row, content in enumerate(self.contents):
            if (entry := self.view.entry(row)) is not None and not self.view.is_closed:
                self.counts["trusted"] += 1
                self.counts["wrong"] += entry[0] != content
            self.counts["naive_wrong"] += bool(self.last[row]) and self.last[row] != content


def main() -> None:
    seed, steps, rows = map(int, sys.argv[1:])
    world = World(seed, rows)
    for step in range(steps):
        moves = [world.store, world.end_store, world.load, world.end_load, world.hold]
        world.draw.choice([*moves, world.release])()
        world.compare()
        if step == steps - 1:
            world.manager.reset_cache()
            world.contents = [None] * rows
            world.compare()
            assert world.policy.ledger is None
            # The manager works on without a ledger.
            world.stores, world.loads = [], []
            world.store()
            world.end_store()
    print(json.dumps(world.counts))


if __name__ == "__main__":
    main()
