"""Common parts of experiments with real engines: the calls that a proxy makes to them, prompts,
figures of rounds in turns.
"""

import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvrs.ids import InstanceId
from kvrs.net.proving import ProvingConnector, agent_keys, instance_keys
from kvrs.profiles import catalog
from kvrs.protocol.instance import CheckpointTarget, InstanceInfo, LoadReport, SourceRange
from kvrs.protocol.secrets import Scope
from kvrs_testkit.processes import Processes

VOCAB_SIZE = 512
FIRST_ORDINARY_TOKEN = 4
_LASTING_S = 3600.0


def session_for(processes: Processes, door: Scope = Scope.INSTANCE) -> aiohttp.ClientSession:
    """Proves one door of each instance, and that of each agent."""
    secret, cluster = processes.secret, processes.config.cluster
    instances = [instance for _, instance in cluster.instances()]
    keys = {**agent_keys(secret, cluster.nodes), **instance_keys(secret, instances, door)}
    timeout = aiohttp.ClientTimeout(total=120)
    return aiohttp.ClientSession(connector=ProvingConnector(keys), timeout=timeout)


@dataclass(frozen=True, slots=True)
class HandOff:
    """The answer of prefill, for the decode call."""

    params: dict[str, Any]


class Rig:
    """Real engines that keep another GPU's clock by sleeping. A token's KV is smaller in the tiny
    model than in the profile's, so its links are slower by as much (`shrink`): equal bytes /
    bandwidth, equal seconds.
    """

    def __init__(self, processes: Processes, session: aiohttp.ClientSession, profile: str) -> None:
        self._urls = {
            instance.id: instance.url for _, instance in processes.config.cluster.instances()
        }
        self._session = session
        self._processes = processes
        self._profile = profile
        self._streams = 0
        self.infos: dict[InstanceId, InstanceInfo] = {}

    async def meet(self) -> None:
        for name, url in self._urls.items():
            async with self._session.get(f"{url}/kvrs/v1/instance") as answer:
                answer.raise_for_status()
                self.infos[name] = msgspec.json.decode(await answer.read(), type=InstanceInfo)
        self.geometry = next(iter(self.infos.values())).geometry
        self.shrink = (
            self.geometry.bytes_per_token / catalog.kv_geometry(self._profile).bytes_per_token
        )

    async def set_link(self, source: str, node: str, bytes_per_s: float) -> None:
        """Hold what the instance sends to a node to this rate, with the limiter that
        `transfer.link_bytes_per_s` uses.
        """
        fault = {"type": "link", "node": node, "bytes_per_s": bytes_per_s, "for_s": _LASTING_S}
        await self._order(source, "/kvrs/v1/faults", fault)

    async def empty(self, *instances: str) -> None:
        """Drop all unused pages of the caches."""
        for instance in instances:
            await self._order(instance, "/reset_prefix_cache", {})

    async def prefill(
        self,
        instance: str,
        history: list[int],
        prompt_tokens: int,
        checkpoints: Sequence[CheckpointTarget] = (),
        stream: str | None = None,
    ) -> HandOff:
        """Compute the history there, and retain it under a lease."""
        body = self._body(history, prompt_tokens, (), checkpoints, stream) | {
            "max_tokens": 1,
            "stream": False,
        }
        body["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = await self._post(instance, "/v1/completions", body)
        return HandOff(answer["kv_transfer_params"])

    async def decode(
        self,
        instance: str,
        history: list[int],
        prompt_tokens: int,
        *,
        sources: Sequence[SourceRange] = (),
        hand_off: HandOff | None = None,
        checkpoints: Sequence[CheckpointTarget] = (),
        tokens: int = 1,
        on_token: Callable[[int], object] = lambda token: None,
        stream: str | None = None,
    ) -> int:
        """The first new token; `on_token` hears of each. Returns when all `tokens` are there."""
        most = len(history) - prompt_tokens + tokens
        body = self._body(history, prompt_tokens, sources, checkpoints, stream) | {
            "max_tokens": most,
            "stream": True,
        }
        if hand_off is not None:
            body["kv_transfer_params"] = hand_off.params
        first: int | None = None
        async with self._session.post(
            f"{self._urls[InstanceId(instance)]}/v1/completions", json=body
        ) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    for token in _token_ids(line[6:]):
                        first = token if first is None else first
                        on_token(token)
        if first is None:
            raise RuntimeError("an engine ended a stream without a token")
        return first

    def new_stream(self) -> str:
        self._streams += 1
        return f"rig-{self._streams}"

    async def load(self, instance: str) -> LoadReport:
        async with self._session.get(f"{self._urls[InstanceId(instance)]}/kvrs/v1/load") as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=LoadReport)

    def _body(
        self,
        history: list[int],
        prompt_tokens: int,
        sources: Sequence[SourceRange],
        checkpoints: Sequence[CheckpointTarget],
        stream: str | None,
    ) -> dict[str, Any]:
        return {
            "model": "tiny-llama",
            "prompt": history,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kvrs": {
                "stream": stream or self.new_stream(),
                "owner_epoch": 0,
                "attempt": 1,
                "prompt_tokens": prompt_tokens,
                "sources": msgspec.to_builtins(list(sources)),
                "checkpoints": msgspec.to_builtins(list(checkpoints)),
            },
        }

    async def _post(self, instance: str, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(self._urls[InstanceId(instance)] + path, json=body) as answer:
            answer.raise_for_status()
            return await answer.json(content_type=None)

    async def _order(self, instance: str, path: str, body: dict[str, Any]) -> None:
        url = self._urls[InstanceId(instance)] + path
        async with (
            session_for(self._processes, Scope.ADMIN) as session,
            session.post(url, json=body) as answer,
        ):
            answer.raise_for_status()


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_events = msgspec.json.Decoder(_Event)


def _token_ids(event: bytes) -> list[int]:
    return [token for choice in _events.decode(event).choices for token in choice.token_ids or []]


def draw(rng: random.Random, count: int) -> list[int]:
    """That many ordinary tokens."""
    return [rng.randrange(FIRST_ORDINARY_TOKEN, VOCAB_SIZE) for _ in range(count)]


def interval(samples: Sequence[float]) -> float:
    """Half of the 95 % interval of the median, by a seeded bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(samples, k=len(samples))) for _ in range(1000))
    return (medians[974] - medians[25]) / 2


def paired(off: Sequence[float], on: Sequence[float]) -> tuple[float, float]:
    """Median of the rounds' ratios less one, and half of its 95 % interval."""
    ratios = [b / a - 1 for a, b in zip(off, on, strict=True)]
    return statistics.median(ratios), interval(ratios)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def process_cpu_s(pid: int) -> float:
    """User and system time of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
