"""A scripted vLLM in a process of its own whose CPU tier is the product's: its memory, ledger and
link to the agent, and its clients of agents. Only the KV is made up: each row says by its bytes
which key it holds.

    python -m kvrs_testkit.tiered_vllm CONFIG INSTANCE PACE_S
"""

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvrs.config.file import load_config
from kvrs.engines.place import EnginePlace, namespace_of
from kvrs.ids import InstanceId
from kvrs.net.routes import Request, Response
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs.protocol.rows import RegionInfo, params_key
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.ledger import RowLedger
from kvrs.vllm.agents import KnownAgents
from kvrs_testkit.row_engine import KEY_BYTES, row_of
from kvrs_testkit.scripted_vllm import PAGE, ScriptedVllm, VllmScript

ROWS, ROW_BYTES = 8192, 1024
LAG_STEPS = 2  # Steps until the copy of a row into the tier is complete.
LOOKUP_S, LOAD_S = 5.0, 20.0  # A busy machine is waited for.


@dataclass(eq=False)
class _Stream:
    """A request, and the rows of its history that the tier has."""

    keys: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


_CURRENT: ContextVar[_Stream] = ContextVar("stream")


class Tier:
    """The rows of one server."""

    def __init__(self, file: str, instance: str) -> None:
        place, fields = EnginePlace(file, instance), {"model": "scripted"}
        info = RegionInfo(instance, namespace_of(fields), ROWS, ROW_BYTES, fields, "tiny", PAGE)
        self.secret = place.secrets[0]
        self._memory = os.memfd_create("rows")
        os.ftruncate(self._memory, ROWS * ROW_BYTES)
        self._ledger = RowLedger(ROWS, ROW_BYTES)
        own, others = place.clients(info.space)
        keys = [params_key(secret, place.instance) for secret in place.secrets]
        self._agents = KnownAgents(own, others, keys)
        self._free = [*range(ROWS)]
        self._link = place.link(info, self._memory, self._ledger, LOOKUP_S)
        self._link.start()

    async def load(self, stream: _Stream, history: Sequence[int], given: Any) -> int:
        """Load the leading rows of the history that agents have, and return their number."""
        agents = self._agents.named(given) or []
        # The last position is computed in any case, for its logits.
        wanted = keys_of(history[:-1])
        found = await asyncio.to_thread(rows_at, agents, wanted)
        for key, row in zip(wanted, found, strict=False):
            assert row == row_of(key, ROW_BYTES), "a wrong row was loaded"
            self._store(stream, key)
        return len(found)

    def computed(self, stream: _Stream, history: Sequence[int]) -> None:
        """Store the rows that were complete `LAG_STEPS` ago."""
        for key in keys_of(history[: max(0, len(history) - LAG_STEPS)], stream.keys):
            self._store(stream, key)

    def end(self, stream: _Stream) -> None:
        for row in stream.rows:
            self._ledger.writing(row)
        self._free += stream.rows

    def _store(self, stream: _Stream, key: bytes) -> None:
        row = self._free.pop()
        self._ledger.writing(row)
        os.pwrite(self._memory, row_of(key, ROW_BYTES), row * ROW_BYTES)
        self._ledger.holds(row, key, protected=True)
        stream.keys.append(key)
        stream.rows.append(row)


def keys_of(tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """The keys of all full rows behind those whose keys are known."""
    key, keys = known[-1] if known else b"", list[bytes]()
    for at in range(len(known) * PAGE, len(tokens) // PAGE * PAGE, PAGE):
        ids = b"".join(token.to_bytes(4) for token in tokens[at : at + PAGE])
        key = blake2b(key + ids, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def rows_at(agents: Sequence[RowClient], wanted: Sequence[bytes]) -> list[bytes]:
    """The leading rows that any of the agents has, as the product's tier asks: all agents for all
    rows, and each row is loaded from the first that has it.
    """
    of_agent: defaultdict[RowClient, list[bytes]] = defaultdict(list)
    having = [(agent, agent.find(wanted, LOOKUP_S)) for agent in agents] if wanted else []
    for at, key in enumerate(wanted):
        holder = next((agent for agent, found in having if found[at]), None)
        if holder is None:
            break
        of_agent[holder].append(key)
    rows: dict[bytes, bytes] = {}
    for agent, keys in of_agent.items():
        views = [memoryview(bytearray(ROW_BYTES)) for _ in keys]
        count = agent.load([*zip(keys, views, strict=True)], LOAD_S)
        rows |= {key: bytes(view) for key, view in zip(keys[:count], views, strict=False)}
    found_keys = list[bytes]()
    for key in wanted:
        if key not in rows:
            break
        found_keys.append(key)
    return [rows[key] for key in found_keys]


@dataclass(eq=False)
class TieredVllm(ScriptedVllm):
    tier: Tier | None = None

    async def start(self) -> None:
        await super().start()
        self.started_s = int(time.time())  # Another one than that of the process before it.

    async def _decode(
        self,
        request: Request,
        parsed: CompletionRequest | ChatRequest,
        transfer: Any,
        known: list[int],
        salt: str | None,
    ) -> Response:
        given = (self.bodies[-1].get("kv_transfer_params") or {}).get("kvrs")
        assert self.tier is not None
        stream = _Stream()
        _CURRENT.set(stream)
        loaded = await self.tier.load(stream, self._history(parsed), given)
        self.row_loads += loaded
        del self.bodies[:-1]
        try:
            return await super()._decode(request, parsed, transfer, known, salt)
        finally:
            self.tier.end(stream)

    def _as_loaded(
        self, transfer: dict[str, Any], parsed: CompletionRequest | ChatRequest
    ) -> CompletionRequest | ChatRequest:
        return parsed

    def _next_token(
        self, parsed: CompletionRequest | ChatRequest, history: list[int], begun_with: int
    ) -> int:
        assert self.tier is not None
        self.tier.computed(_CURRENT.get(), history)
        return super()._next_token(parsed, history, begun_with)


async def main() -> None:
    file, name, pace_s = sys.argv[1:]
    config = load_config(Path(file), os.environ)
    node, instance = config.cluster.find(InstanceId(name))
    tier, model = Tier(file, name), config.cluster.model
    assert model is not None
    server = TieredVllm(
        name,
        node.id,
        port=instance.port,
        secret=tier.secret,
        role="decode",
        script=VllmScript(pause_s=float(pace_s)),
        model=model,
        root=model,
        connector=False,
        has_tier=True,
        row_bytes=float(PAGE * ModelFiles(model).of(model).geometry(PAGE).bytes_per_token),
        tier=tier,
    )
    await server.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
