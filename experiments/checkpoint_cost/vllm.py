"""Cost of kvrs in the CPU tier of real vLLM, on the CPU: streams, first tokens, loaded histories.

    python -m experiments.checkpoint_cost.vllm [--rounds 60] [--prompts 20] [--pairs 20]

One node with its agent and four servers: one is vLLM without a connector, one has upstream's
OffloadingConnector without kvrs. Streams: the same load there and at a server with kvrs, protected
or not, in turns: time between tokens, tokens
per second, CPU time of the server per token. First tokens: unprotected prompts, and
protected ones, each at both servers, while the agent is well, stopped and dead. Restoring: the
first token behind a history, loaded from the memory of another server and computed, at the same
server.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import draw, interval, paired, percentile, process_cpu_s
from kvrs_testkit.processes import below
from kvrs_testkit.vllm_rows import CPU_BYTES, KVRS, RowServers, regions
from kvrs_testkit.vllm_servers import PAGE_TOKENS, REQUEST_TIMEOUT_S

# Two servers with kvrs, vLLM alone, and with upstream's connector.
WITH, OTHER, WITHOUT, UPSTREAM = "d0", "d1", "d2", "d3"
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 40, 600
HISTORY_TOKENS, BEHIND_TOKENS = 1500, 8
# A way of running the streams: the server, and fields of the requests.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "off": (WITHOUT, {}),
    "upstream": (UPSTREAM, {}),
    "unprotected": (WITH, {}),
    "protected": (WITH, KVRS),
}
OF_KVRS = ("unprotected", "protected")
AGENT = ("well", "stopped", "dead")
MAX_COST = 0.02
LOOKUP_S, LOAD_S = 0.3, 2.0  # Defaults of the tier: how long an agent may take.
WAITS_S = LOOKUP_S / 2  # So much later than alone a prompt has waited for an agent.
MAX_RATIO = 1.0  # Of the first token behind a history, loaded, to the same computed.
_LINKED_S = 2.0  # Within that an engine has found the next agent.


@dataclass
class Answer:
    """The ids of a stream, and when its request was sent and each event came."""

    sent_s: float
    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (len(self.ids) - 1)

    @property
    def gaps_s(self) -> Iterator[float]:
        return (later - earlier for earlier, later in pairwise(self.times_s))


@dataclass
class Side:
    """One way of running the same streams; a sample is one round."""

    cpu_s: list[float] = field(default_factory=list)  # Per token.
    tpot_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, servers: RowServers, http: aiohttp.ClientSession, seed: int) -> None:
        self._servers, self._http = servers, http
        self._rng = random.Random(seed)

    async def ask(self, name: str, prompt: list[int], tokens: int, **fields: Any) -> Answer:
        body = {
            "model": self._servers.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        } | fields
        answer = Answer(time.perf_counter())
        url = f"{self._servers.url(name)}/v1/completions"
        async with self._http.post(url, json=self._servers.sealed(name, body)) as events:
            events.raise_for_status()
            async for line in events.content:
                if line.startswith(b"data: {"):
                    answer.ids += json.loads(line[6:])["choices"][0]["token_ids"]
                    answer.times_s.append(time.perf_counter())
        return answer

    async def rounds(self, count: int) -> dict[str, Side]:
        """So many rounds of each side in turns, behind one that is not counted."""
        sides = {name: Side() for name in SIDES}
        for name in SIDES:
            await self._round(name, Side())
        for _ in range(count):
            for name in self._rng.sample([*SIDES], len(SIDES)):
                await self._round(name, sides[name])
        return sides

    async def _round(self, name: str, side: Side) -> None:
        server, fields = SIDES[name]
        prompts = [draw(self._rng, PROMPT_TOKENS) for _ in range(STREAMS)]
        cpu_s, at_s = self._cpu_s(server), time.perf_counter()
        answers = await asyncio.gather(
            *(self.ask(server, prompt, OUTPUT_TOKENS, **fields) for prompt in prompts)
        )
        tokens = STREAMS * OUTPUT_TOKENS
        side.tokens_per_s.append(tokens / (time.perf_counter() - at_s))
        side.cpu_s.append((self._cpu_s(server) - cpu_s) / tokens)
        side.tpot_s.append(statistics.median(answer.tpot_s for answer in answers))
        side.gaps_s += [gap_s for answer in answers for gap_s in answer.gaps_s]

    def _cpu_s(self, name: str) -> float:
        pid = self._servers.pid(name)
        return sum(map(process_cpu_s, (pid, *below(pid))))

    async def first_tokens(self, agent: str, count: int) -> list[dict[str, Any]]:
        """First tokens of so many prompts, each at all sides in random order."""
        found = []
        async with self._agent_is(agent):
            for _ in range(count):
                prompt = draw(self._rng, HISTORY_TOKENS)
                first_s = {}
                for name in self._rng.sample([*SIDES], len(SIDES)):
                    server, fields = SIDES[name]
                    # Of a tenant of its own: no cache has what another side has computed.
                    answer = await self.ask(server, prompt, 1, cache_salt=name, **fields)
                    first_s[name] = answer.first_s
                found.append({"agent": agent} | first_s)
        return found

    @asynccontextmanager
    async def _agent_is(self, state: str) -> AsyncIterator[None]:
        servers = self._servers
        if state == "stopped":
            servers.signal(servers.agent, signal.SIGSTOP)
        elif state == "dead":
            servers.kill(servers.agent)
        try:
            yield
        finally:
            if state == "stopped":
                servers.signal(servers.agent, signal.SIGCONT)
            elif state == "dead":
                await asyncio.to_thread(servers.start, servers.agent)
                await asyncio.to_thread(servers.wait_ready, servers.agent)
            await asyncio.sleep(_LINKED_S)

    async def pair(self) -> dict[str, Any]:
        """The first token behind one history, loaded and computed in random order."""
        prompt = draw(self._rng, HISTORY_TOKENS)
        calm = await self.ask(WITH, prompt, BEHIND_TOKENS, **KVRS)
        before = self._servers.loaded_tokens(OTHER)
        ways = {"loaded_s": KVRS, "computed_s": {"cache_salt": "computed"}}
        found: dict[str, Any] = {"exact": True}
        for way in self._rng.sample([*ways], len(ways)):
            answer = await self.ask(OTHER, prompt, BEHIND_TOKENS, **ways[way])
            found[way] = answer.first_s
            found["exact"] &= answer.ids == calm.ids
        blocks = (self._servers.loaded_tokens(OTHER) - before) // PAGE_TOKENS
        return found | {"loaded_blocks": int(blocks)}


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


async def measure(servers: RowServers, options: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        bench = Bench(servers, http, options.seed)
        _say(f"{options.rounds} rounds of {len(SIDES)} sides")
        streams = _streams(await bench.rounds(options.rounds))
        _say(str(streams))
        firsts = []
        for agent in AGENT:
            firsts += await bench.first_tokens(agent, options.prompts)
            _say(str(_first(firsts, agent)))
        _say(f"{options.pairs} histories, loaded and computed")
        pairs = [await bench.pair() for _ in range(options.pairs + 1)][1:]
    return {
        "streams": streams,
        "first_tokens": {agent: _first(firsts, agent) for agent in AGENT},
        "restoring": _restoring(pairs),
    }


def _streams(sides: Mapping[str, Side]) -> dict[str, Any]:
    """Medians of the rounds, and what each side costs beside `off`."""
    names = ("cpu_s", "tpot_s", "tokens_per_s")
    found: dict[str, Any] = {"rounds": len(sides["off"].cpu_s)}
    for side, samples in sides.items():
        found[side] = {name: statistics.median(getattr(samples, name)) for name in names}
        found[side]["gap_s_p99"] = percentile(samples.gaps_s, 0.99)
        if side != "off":
            for name in names:
                cost, spread = paired(getattr(sides["off"], name), getattr(samples, name))
                found[side][f"{name}_cost"] = {"cost": cost, "interval": spread}
        if side in OF_KVRS:
            for name in names:
                cost, spread = paired(getattr(sides["upstream"], name), getattr(samples, name))
                found[side][f"{name}_over_upstream"] = {"cost": cost, "interval": spread}
    return found


def _first(firsts: Sequence[Mapping[str, Any]], agent: str) -> dict[str, Any]:
    rows = [row for row in firsts if row["agent"] == agent]
    found: dict[str, Any] = {"prompts": len(rows)}
    for side in SIDES:
        found[side] = {"first_s": statistics.median(row[side] for row in rows)}
        if side != "off":
            added_s = [row[side] - row["off"] for row in rows]
            found[side] |= {
                "added_s": statistics.median(added_s),
                "added_s_interval": interval(added_s),
                "waits": sum(each >= WAITS_S for each in added_s),
                "added_s_max": max(added_s),
            }
    return found


def _restoring(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [pair["loaded_s"] / pair["computed_s"] for pair in pairs]
    return {
        "pairs": len(pairs),
        "loaded_s": statistics.median(pair["loaded_s"] for pair in pairs),
        "computed_s": statistics.median(pair["computed_s"] for pair in pairs),
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "loaded_blocks": min(pair["loaded_blocks"] for pair in pairs),
        # At least one token is computed.
        "blocks": (HISTORY_TOKENS - 1) // PAGE_TOKENS,
        "exact": sum(pair["exact"] for pair in pairs),
    }


def as_text(result: Mapping[str, Any]) -> str:
    streams, restoring = result["streams"], result["restoring"]
    lines = [
        f"{streams['rounds']} rounds of {STREAMS} streams ({PROMPT_TOKENS} + {OUTPUT_TOKENS} "
        "tokens) in turns; costs beside vLLM alone"
    ]
    for side in SIDES:
        row = streams[side]
        line = (
            f"  {side:<12}TPOT {row['tpot_s'] * 1e3:6.2f} ms  CPU {row['cpu_s'] * 1e6:5.0f} us a "
            f"token  {row['tokens_per_s']:5.0f} tokens/s  gaps p99 {row['gap_s_p99'] * 1e3:5.1f} ms"
        )
        for name, what in (("tpot_s", "TPOT"), ("cpu_s", "CPU"), ("tokens_per_s", "tokens/s")):
            if cost := row.get(f"{name}_cost"):
                line += f"  {what} {cost['cost']:+.1%} ± {cost['interval']:.1%}"
        lines.append(line)
        if side in OF_KVRS:
            over = [
                f"{what} {cost['cost']:+.1%} ± {cost['interval']:.1%}"
                for name, what in (("tpot_s", "TPOT"), ("cpu_s", "CPU"))
                if (cost := row[f"{name}_over_upstream"])
            ]
            lines.append(f"  {'':<12}beside upstream's connector: {', '.join(over)}")
    lines.append(f"first token of prompts of {HISTORY_TOKENS} tokens, ms more than vLLM alone")
    for agent, row in result["first_tokens"].items():
        parts = [
            f"{side} {row[side]['added_s'] * 1e3:+.0f} ± {row[side]['added_s_interval'] * 1e3:.0f} "
            f"(most {row[side]['added_s_max'] * 1e3:+.0f}, waits {row[side]['waits']})"
            for side in SIDES
            if side != "off"
        ]
        lines.append(
            f"  agent {agent:<9}{row['prompts']} prompts, alone {row['off']['first_s'] * 1e3:.0f}; "
            + "; ".join(parts)
        )
    lines.append(
        f"restoring {HISTORY_TOKENS} tokens, {restoring['pairs']} pairs: first token after "
        f"{restoring['loaded_s'] * 1e3:.0f} ms loaded, {restoring['computed_s'] * 1e3:.0f} ms "
        f"computed, ratio {restoring['ratio']:.2f} ± {restoring['interval']:.2f}; "
        f"{restoring['loaded_blocks']} of {restoring['blocks']} blocks loaded, "
        f"{restoring['exact']} of them exact"
    )
    return "\n".join(lines) + "\n"


def missed(result: Mapping[str, Any]) -> list[str]:
    """The bars that are missed."""
    found = [
        f"{side}: {result['streams'][side][f'{name}_cost']['cost']:+.1%} {what}; bar {MAX_COST:.0%}"
        for side in OF_KVRS
        for name, what in (("cpu_s", "CPU per token"), ("tpot_s", "TPOT"))
        if result["streams"][side][f"{name}_cost"]["cost"] > MAX_COST
    ]
    for agent, row in result["first_tokens"].items():
        if waits := row["unprotected"]["waits"]:
            found.append(f"agent {agent}: {waits} unprotected prompts have waited; bar 0")
        most_s = row["protected"]["added_s_max"]
        if most_s > LOOKUP_S + LOAD_S:
            found.append(
                f"agent {agent}: a protected prompt has waited {most_s:.1f} s; bar "
                f"{LOOKUP_S + LOAD_S:g}"
            )
    restoring = result["restoring"]
    if restoring["ratio"] > MAX_RATIO:
        found.append(f"loading takes {restoring['ratio']:.2f} of computing; bar {MAX_RATIO:g}")
    if restoring["loaded_blocks"] < restoring["blocks"]:
        found.append(f"{restoring['loaded_blocks']} blocks were loaded; bar {restoring['blocks']}")
    if restoring["exact"] < restoring["pairs"]:
        found.append(f"{restoring['exact']} histories went on exactly; bar {restoring['pairs']}")
    return found


def upstreams_connector() -> dict[str, Any]:
    """Configuration of vLLM's own connector, with the same memory and copies, for answers too."""
    tier = {"spec_name": "CpuTieringSpec", "spec_module_path": "kvrs_testkit.vllm_cpu_tier"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": tier
        | {"cpu_bytes_to_use": CPU_BYTES, "offload_prompt_only": False},
    }


@contextmanager
def upstreams_region() -> Iterator[None]:
    """Remove the memory that vLLM alone leaves behind when it is killed."""
    before = regions()
    try:
        yield
    finally:
        for name in regions() - before:
            Path("/dev/shm", name).unlink()  # noqa: S108 - where vLLM has it.


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    record = Record(options.seed)
    with (
        tempfile.TemporaryDirectory() as directory,
        upstreams_region(),
        RowServers(Path(directory), instances=4) as servers,
    ):
        servers.stock.add(WITHOUT)
        servers.transfer[UPSTREAM] = upstreams_connector()
        servers.start_all()
        result = asyncio.run(measure(servers, options))
    misses = missed(result)
    text = as_text(result) + "".join(f"MISSED: {each}\n" for each in misses)
    print(text, end="")
    is_void = record.keep(options.out, "vllm", result, text)
    return 2 if is_void else 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
