"""Blocks of running requests, as the output of vLLM's scheduler tells them step by step."""

from collections.abc import Mapping
from typing import Any

# Fields of the output's parts.
READS: Mapping[str, tuple[str, ...]] = {
    "SchedulerOutput": (
        *("finished_req_ids", "scheduled_new_reqs", "scheduled_cached_reqs"),
        "num_scheduled_tokens",
    ),
    "NewRequestData": ("req_id", "block_ids"),
    "CachedRequestData": ("req_ids", "resumed_req_ids", "new_block_ids"),
}


class BlockTable:
    """Blocks of the first KV group. vLLM before 0.32 tells them in no other way."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}

    def update(self, output: Any) -> None:
        """Take the `SchedulerOutput` of a step."""
        for name in output.finished_req_ids:
            self._blocks.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = [*new.block_ids[0]]
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:  # After a preemption: all of its blocks are new.
                self._blocks[name] = [*blocks[0]]
            elif blocks is not None:
                self._blocks[name] += blocks[0]

    def of(self, request_id: str) -> list[int]:
        return self._blocks[request_id]
