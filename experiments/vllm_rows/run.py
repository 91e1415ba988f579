"""Servers of real vLLM with kvrs in their own CPU tier die in mid-stream, and their streams go on
at another server of the node, from the rows of the dead one.

    python -m experiments.vllm_rows.run [--limit-s S] [--kind KIND] [--nixl]

A run adds rounds to those that the same code has measured before. Needs KVRS_VLLM_PYTHON.
"""

import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.deaths import as_text, by_kind, differences, rounds
from experiments.record import Record
from kvrs_testkit.row_agent import until
from kvrs_testkit.vllm_rows import TierServers, prompt_of, row_config
from kvrs_testkit.vllm_servers import PAGE_TOKENS, Part, ServerError

NAME = "vllm_rows"
STREAMS, TOKENS = 8, 300
# Of streams that are still to run when the next agent has started, also on a busy machine.
TOKENS_OF = {"agent": 1500}
SLOW_COPY_MS = 15
# Of kvrs in vLLM: agents and threads that are late on a busy machine are waited for.
PATIENT = {"lookup_s": 5.0, "load_s": 20.0}
# By kind: rounds, the part of the server that is killed, and what becomes of the agent.
DEATHS: dict[str, tuple[int, Part]] = {
    "server": (30, Part.SERVER),
    "worker": (15, Part.WORKER),
    "agent": (6, Part.SERVER),  # The agent first; the next one has come when the server dies.
    "node": (6, Part.SERVER),  # With its agent, and so with all rows.
}
LAG_BLOCKS = 2  # Of each stream: full blocks that need not have a row.
SERVERS = ("d0", "d1")
# Hands prompts over by NIXL, and has no tier, so that every row is of a server that decodes.
PREFILL = "p0"
_COLUMNS = (
    *("rounds", "slow", "streams", "handed_bytes", "lost", "repeated", "different"),
    *("full_blocks", "loaded_blocks", "engines_ended", "turned_off"),
)
_OFF = ("kvrs saves no KV", "kvrs is off")


class Rounds:
    """A node with two servers, of which one dies in each round. Where it has a prefill server,
    streams begin with a prompt that NIXL has brought.
    """

    def __init__(self, servers: TierServers, seed: int) -> None:
        self._servers, self._seed = servers, seed
        self._victim = 0
        self._delay_ms = dict.fromkeys(SERVERS, 0)

    def measure(self, name: str) -> dict[str, Any]:
        kind = name.split()[0]
        tokens = TOKENS_OF.get(kind, TOKENS)
        draw = random.Random(f"{self._seed} {name}")
        victim, other = SERVERS[self._victim], SERVERS[1 - self._victim]
        prompts = [prompt_of(draw.randrange(1 << 30)) for _ in range(STREAMS)]
        cell: dict[str, Any] = {"victim": victim, "copy_delay_ms": self._delay_ms[victim]}
        with ThreadPoolExecutor(STREAMS) as pool:
            got, handed_bytes = self._cut(kind, victim, prompts, tokens, draw, pool)
            before = self._servers.loaded_tokens(other)
            rests = [
                *pool.map(lambda prompt, ids: self._go_on(other, prompt, ids, tokens), prompts, got)
            ]
            loaded = self._servers.loaded_tokens(other) - before
            self._start_again(victim, SLOW_COPY_MS if draw.random() < 0.5 else 0)
            calm = [*pool.map(lambda each: self._calm(other, each, tokens), prompts)]
        histories = [
            prompt + ids for prompt, ids in zip(prompts, got, strict=True) if len(ids) < tokens
        ]
        said = self._servers.said()
        cell |= {
            "tokens_at_death": [len(each) for each in got],
            "streams": len(histories),
            "handed_bytes": handed_bytes,
            **compared(got, rests, calm),
            "full_blocks": sum(len(each) // PAGE_TOKENS for each in histories),
            "loaded_blocks": int(loaded) // PAGE_TOKENS,
            "engines_ended": sum(
                not self._servers.is_up(name) for name in self._servers.names if name != victim
            ),
            "turned_off": sum(said.count(words) for words in _OFF),
        }
        self._servers.wait_ready(victim)
        self._victim = 1 - self._victim
        return cell

    def _cut(
        self,
        kind: str,
        victim: str,
        prompts: Sequence[list[int]],
        tokens: int,
        draw: random.Random,
        pool: ThreadPoolExecutor,
    ) -> tuple[list[list[int]], int]:
        """Return what the clients have when the server dies, at a moment by all their tokens, and
        the bytes that NIXL had brought for these streams.
        """
        before = self._servers.counters(victim)["pulled_bytes"]
        got: list[list[int]] = [[] for _ in prompts]
        # All of them; where the agent dies, too, that is when it does.
        dies_at = draw.randrange(STREAMS * TOKENS // 5, STREAMS * TOKENS * 4 // 5)
        due = threading.Event()

        def read(number: int) -> None:
            def more(ids: list[int]) -> None:
                got[number].extend(ids)
                if sum(map(len, got)) >= dies_at:
                    due.set()

            handed = self._handed(prompts[number])
            with suppress(ServerError):  # Of a server whose worker has died.
                self._servers.stream(victim, prompts[number], tokens, more, **handed)

        reading = [pool.submit(read, number) for number in range(STREAMS)]
        due.wait()
        handed_bytes = int(self._servers.counters(victim)["pulled_bytes"] - before)
        if kind == "agent":
            self._servers.kill(self._servers.agent)
            self._servers.start(self._servers.agent)
            self._servers.wait_ready(self._servers.agent)
            until(lambda: f"rows engine={victim} " in self._servers.said())  # It is dialled.
        if kind == "node":
            self._servers.kill(self._servers.agent)
        self._servers.kill(victim, DEATHS[kind][1])
        for each in reading:
            each.result()
        if kind == "node":
            self._servers.start(self._servers.agent)
        return got, handed_bytes

    def _handed(self, prompt: list[int]) -> dict[str, Any]:
        """Fields of a stream's request: where NIXL finds the KV of its prompt."""
        if not self._servers.are_handed_prompts:
            return {}
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = self._servers.complete(
            PREFILL, prompt=prompt, max_tokens=1, kv_transfer_params=asked
        )
        return {"kv_transfer_params": answer["kv_transfer_params"]}

    def _go_on(self, name: str, prompt: list[int], got: list[int], tokens: int) -> list[int]:
        rest: list[int] = []
        if len(got) < tokens:
            self._servers.stream(name, prompt + got, tokens - len(got), rest.extend)
        return rest

    def _calm(self, name: str, prompt: list[int], tokens: int) -> list[int]:
        found = self._servers.complete(name, prompt=prompt, max_tokens=tokens, cache_salt="calm")
        return list(found["choices"][0]["token_ids"])

    def _start_again(self, name: str, delay_ms: int) -> None:
        self._servers.environment["KVRS_COPY_DELAY_MS"] = str(delay_ms)
        self._delay_ms[name] = delay_ms
        self._servers.start(name)


def compared(
    got: Sequence[list[int]], rests: Sequence[list[int]], calm: Sequence[list[int]]
) -> dict[str, int]:
    """Count the differences of what clients have had from the same streams without a death."""
    whole = [ids + rest for ids, rest in zip(got, rests, strict=True)]
    return dict(differences(zip(whole, calm, strict=True)))


def summary(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by kind of death, and of all."""
    counted = {
        name: {**cell, "slow": int(cell["copy_delay_ms"] > 0)} for name, cell in cells.items()
    }
    return by_kind(counted, DEATHS)


def missed(figures: Mapping[str, Any], *, is_handed: bool = False) -> list[str]:
    """The bars that are missed. `is_handed`: prompts were to come by NIXL."""
    found = [
        f"{figures['all'][what]} {what}; bar 0"
        for what in ("lost", "repeated", "different", "engines_ended", "turned_off")
        if figures["all"].get(what)
    ]
    for kind, counts in figures.items():
        if counts and not counts["streams"]:
            found.append(f"{kind}: no stream was open at the death")
        if is_handed and counts and not counts["handed_bytes"]:
            found.append(f"{kind}: NIXL has brought nothing")
        if kind in ("node", "all") or not counts:
            continue
        behind = counts["full_blocks"] - counts["loaded_blocks"]
        if behind > LAG_BLOCKS * STREAMS * counts["rounds"]:
            found.append(f"{kind}: {behind} full blocks were not loaded; bar two per stream")
    return found


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--limit-s", type=float, default=3000.0, help="no round begins later")
    parser.add_argument("--kind", choices=[*DEATHS], help="rounds of this kind alone")
    parser.add_argument("--nixl", action="store_true", help="prompts are handed over by NIXL")
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    kinds = [options.kind] if options.kind else [*DEATHS]
    names = rounds({kind: DEATHS[kind][0] for kind in kinds})
    settings = {"streams_per_round": STREAMS, "tokens": TOKENS, "nixl": options.nixl}
    cells = Cells(options.out, NAME, settings)
    give_up_s = time.monotonic() + options.limit_s
    nodes = {"n0": [PREFILL, *SERVERS] if options.nixl else SERVERS}
    with (
        TemporaryDirectory() as directory,
        TierServers(row_config(Path(directory), nodes)) as servers,
    ):
        servers.options |= {"requests": "all", **PATIENT}
        servers.stock.add(PREFILL)
        servers.start_all()
        drill = Rounds(servers, options.seed)
        for name in names:
            if name in cells.found or time.monotonic() > give_up_s:
                continue
            cells.measure([name], options.limit_s, drill.measure)
            figures = summary(cells.found)
            text = as_text(figures, _COLUMNS, missed(figures, is_handed=options.nixl))
            cells.keep(record, {"by_death": figures}, text)
    figures = summary(cells.found)
    misses = missed(figures, is_handed=options.nixl)
    print(as_text(figures, _COLUMNS, misses))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
