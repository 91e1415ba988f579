"""A scripted vLLM in a process of its own, which can be stopped as a process.

    python -m kvrs_testkit.vllm_process ID NODE ROLE PACE_S

Prints its port, then serves until the end of stdin. It knows nothing of other servers, and pulls no
KV: every hand-off is taken.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript


class LoneVllm(ScriptedVllm):
    def _pull(self, history: list[int], transfer: dict[str, Any]) -> bool:
        return True


@asynccontextmanager
async def vllm_process(
    name: str, node: str, role: str, pace_s: float
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """The process, and the port that it listens on."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", __name__, name, node, role, str(pace_s)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process, int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def main() -> None:
    name, node, role, pace_s = sys.argv[1:]
    server = LoneVllm(name, node, role=role, script=VllmScript(pause_s=float(pace_s)))
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    asyncio.run(main())
