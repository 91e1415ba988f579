"""Cache policy of vLLM's CPU tier that keeps a ledger of its rows for the node's agent.

vLLM loads it by `eviction_policy: KvrsPolicy` and `cache_policy_module_path: kvrs.vllm.ledger`. The
policy evicts as vLLM's LRU does, but rows of protected streams last, and notes each change in the
ledger: vLLM calls `insert` before it plans a copy into a row, and `mark_evictable` when all workers
have reported that the copy is complete. An error in the ledger closes the ledger, and the LRU goes
on.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from kvrs.transfer.rows.ledger import RowLedger
from kvrs.vllm.adapters import BASE, LoraAdapter

log = logging.getLogger(__name__)
P = ParamSpec("P")

# Number added to the rank of a protected row: vLLM counts ranks up from 1 and evicts the lowest, so
# protected rows go last.
_PROTECTED = 1 << 62
_policies: "list[KvrsPolicy]" = []  # All policies made in this process; the engine uses the latest.


def latest() -> "KvrsPolicy | None":
    return _policies[-1] if _policies else None


def _noting(note: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(note)
    def guarded(*args: P.args, **more: P.kwargs) -> None:
        policy: Any = args[0]
        if policy.ledger is None:
            return
        try:
            note(*args, **more)
        except Exception:
            log.exception("kvrs saves no KV from here on: the ledger of rows failed")
            policy.give_up()

    return guarded


class KvrsPolicy(LRUCachePolicy):  # type: ignore[misc]  # vLLM is not checked.
    """vLLM's LRU, and a ledger of each row's contents. `ledger` is None if there is none."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.ledger: RowLedger | None = None
        # By id of a protected request: keys of the rows that the request needs.
        self._keys_of: dict[str, set[OffloadKey]] = {}
        self._holders: Counter[OffloadKey] = Counter()
        self._adapters: dict[
            OffloadKey, LoraAdapter
        ] = {}  # Adapter by key, of all stored and a few evicted rows.
        try:
            self.ledger = RowLedger(cache_capacity)
        except Exception:
            log.exception("kvrs saves no KV: there is no ledger of %d rows", cache_capacity)
        _policies.append(self)

    def hold(self, request: str, keys: Iterable[OffloadKey]) -> None:
        """Protect the stored rows of `keys` for a request: they are evicted last, until
        `release`.
        """
        held = self._keys_of.setdefault(request, set())
        for key in keys:
            if key not in held and key in self.chunks:
                held.add(key)
                self._holders[key] += 1
                if self._holders[key] == 1:
                    self._rank(key, self._ranks[key] + _PROTECTED)
                    self._protects(key, True)

    def release(self, request: str) -> None:
        """End the protection of the rows of a request that has ended."""
        for key in self._keys_of.pop(request, ()):
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                if key in self.chunks:
                    self._rank(key, self._ranks[key] - _PROTECTED)
                    self._protects(key, False)

    def _rank(self, key: OffloadKey, rank: int) -> None:
        self._ranks[key] = rank
        if key in self._evictable:
            self._push_evictable(key)

    def _assign_new_rank(self, key: OffloadKey) -> bool:
        is_evictable: bool = super()._assign_new_rank(key)
        if key in self._holders and key in self.chunks:
            self._ranks[key] += _PROTECTED
        return is_evictable

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: Any) -> None:
        self._note_adapter(list(keys), req_context)
        super().on_store_miss(keys, req_context)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._writing(chunk.chunk_id)
        super().insert(key, chunk)
        # Protect the row again: it was evicted while a stream that needs it ran.
        if key in self._holders:
            self._rank(key, self._ranks[key] + _PROTECTED)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._holds(key)
        super().mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        self._writing(self.chunks[key].chunk_id)
        super().remove(key)

    def clear(self) -> None:
        """Forget all rows, as after a change of weights, so that agents serve none of them."""
        log.error("kvrs saves no KV from here on: the cache was reset")
        self.give_up()
        self._keys_of.clear()
        self._holders.clear()
        super().clear()

    def give_up(self) -> None:
        """Close the ledger after an error: agents serve no row of this engine any more."""
        ledger, self.ledger = self.ledger, None
        if ledger is not None:
            # An error may be ignored, because the first step of closing withdraws all rows.
            with suppress(Exception):
                ledger.close()

    @_noting
    def _writing(self, row: int) -> None:
        assert self.ledger is not None
        self.ledger.writing(row)

    @_noting
    def _holds(self, key: OffloadKey) -> None:
        assert self.ledger is not None
        for shared in self._adapters.get(key, BASE).scoped([key]):
            row, protected = self.chunks[key].chunk_id, key in self._holders
            self.ledger.holds(row, shared, protected=protected)

    @_noting
    def _protects(self, key: OffloadKey, protected: bool) -> None:
        assert self.ledger is not None
        self.ledger.protect(self.chunks[key].chunk_id, protected=protected)

    @_noting
    def _note_adapter(self, keys: Sequence[OffloadKey], req_context: Any) -> None:
        adapter = req_context.get_state(LoraAdapter)
        if adapter in (None, BASE):
            return
        if len(self._adapters) > 2 * self.cache_capacity:
            self._adapters = {
                key: each for key, each in self._adapters.items() if key in self.chunks
            }
        self._adapters |= dict.fromkeys(keys, adapter)
