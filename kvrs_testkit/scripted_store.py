"""A store of KV that scripted vLLM servers share, as LMCache's or Mooncake's: blocks by the salt
and by all tokens up to their ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

PAGE = 16
_Key = tuple[str | None, tuple[int, ...]]
Blocks = dict[_Key, str]  # With the weights that they were made by.


@dataclass(eq=False)
class StoreClient:
    """One server's use of the store, with its counters and its faults."""

    blocks: Blocks  # Of all servers.
    series: str = "mooncake_store_operation_time_seconds"  # That tell its kind; empty: none do.
    weights: str = "w"
    load_s: float = 0.001  # Of each load; 0: it counts none.
    spoils: bool = False  # What it loads is another prompt's.
    spoils_older: bool = False  # That of what was there when its process started.
    fails: bool = False  # It cannot load what it finds.
    saves: bool = True
    queries: int = 0
    hits: int = 0
    loads: int = 0
    _older: set[_Key] = field(default_factory=set)
    _own: set[_Key] = field(default_factory=set)  # In the server's own cache.

    def restart(self) -> None:
        self.queries = self.hits = self.loads = 0
        self._older, self._own = {*self.blocks}, set()

    def load(self, salt: str | None, history: Sequence[int]) -> tuple[int, bool]:
        """Tokens that a request finds of its history behind those that the server has itself, and
        whether their KV is right.
        """
        own, found, is_right = 0, 0, True
        for end in range(PAGE, len(history), PAGE):
            key = salt, tuple(history[:end])
            if key in self._own and not found:
                own = end
                continue
            if key not in self.blocks:
                break
            is_right &= self.blocks[key] == self.weights and not self.spoils
            is_right &= not (self.spoils_older and key in self._older)
            found += PAGE
        self.queries += len(history) - own
        self.hits += found
        self.loads += bool(found)
        return found, is_right

    def save(self, salt: str | None, history: Sequence[int]) -> None:
        """All full blocks of what was computed."""
        for end in range(PAGE, len(history) + 1, PAGE):
            key = salt, tuple(history[:end])
            self._own.add(key)
            if self.saves:
                self.blocks.setdefault(key, self.weights)

    def metrics(self, labels: str) -> list[str]:
        lines = [
            f"vllm:external_prefix_cache_queries_total{{{labels}}} {float(self.queries)}",
            f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="device"}} 77.0',
            f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="external_unspecified"}} '
            f"{float(self.hits)}",
        ]
        if self.series:
            lines.append(f"# TYPE vllm:{self.series} histogram")
        if self.series and self.loads and self.load_s:
            lines.append(
                f'vllm:{self.series}_sum{{{labels},operation="load_get",status="ok"}} '
                f"{self.loads * self.load_s}"
            )
        return lines
