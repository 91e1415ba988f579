"""CPU that the proxy of one tree takes for a token, beside that of another tree.

    python -m experiments.paired_trees.run --before DIR [--rounds 12] [--seconds 4] [--out DIR]

`kvrs up` runs from both trees, each with its own proxy and engines; the same load goes to one and
to the other in turn. `--before` is a checkout with a `.venv` of its own.
"""

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from experiments.record import Record, commit_of, shown

STREAMS = 8
PACE = "opt-13b-a100-distserve-tp1"
TOKENS = 128
START_S = 120.0
MOST_RATIO = 1.03


class Tree:
    """`kvrs up` of one checkout, as a process."""

    def __init__(self, path: Path, python: str, directory: Path) -> None:
        self._log = directory / f"{path.name}.log"
        config = directory / f"{path.name}.yaml"
        nodes = [
            {"id": "n0", "instances": [{"id": "p0", "role": "prefill"}]},
            {"id": "n1", "instances": [{"id": "d0", "role": "decode"}]},
        ]
        config.write_text(yaml.safe_dump({"cluster": {"nodes": nodes, "engine": {"pace": PACE}}}))
        command = [python, "-m", "kvrs", "up", "--port", "0", "--admin-port", "0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--config", str(config)], cwd=path, stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        deadline_s = time.monotonic() + START_S
        while "Ctrl-C ends it" not in (text := self._log.read_text()):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(text)
            time.sleep(0.1)
        (self.url,) = re.findall(r"kvrs is up: (\S+/v1) ", text)
        self.pid = _proxy_below(self._process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.send_signal(2)
        self._process.wait(30)

    @property
    def cpu_s(self) -> float:
        """CPU time of all threads of the proxy."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _proxy_below(ancestor: int) -> int:
    """The process `kvrs proxy` among the descendants of a process."""
    parents: dict[int, int] = {}
    proxies: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kvrs" in words and b"proxy" in words:
            proxies.append(pid)
    for proxy in proxies:
        above = proxy
        while above := parents.get(above, 0):
            if above == ancestor:
                return proxy
    raise SystemExit(f"no proxy below process {ancestor}")


async def stream(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> int:
    """Tokens of one stream."""
    body = {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    async with http.post(f"{url}/completions", json=body) as response:
        found = re.findall(rb'"completion_tokens":(\d+)', await response.read())
    return int(found[-1])


async def per_token_us(tree: Tree, seconds: float, rng: random.Random) -> float:
    before_s, begun_s, tokens = tree.cpu_s, time.monotonic(), 0
    async with aiohttp.ClientSession() as http:

        async def client() -> None:
            nonlocal tokens
            while time.monotonic() - begun_s < seconds:
                tokens += await stream(http, tree.url, [rng.randrange(3, 500) for _ in range(64)])

        await asyncio.gather(*(client() for _ in range(STREAMS)))
    return (tree.cpu_s - before_s) / tokens * 1e6


async def measure(trees: list[Tree], rounds: int, seconds: float, seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    for tree in trees:
        await per_token_us(tree, seconds, rng)
    taken: list[list[float]] = [[] for _ in trees]
    for number in range(rounds):
        order = list(range(len(trees)))[:: 1 if number % 2 else -1]
        for which in order:
            taken[which].append(await per_token_us(trees[which], seconds, rng))
        print("  ".join(f"{each[-1]:7.2f}" for each in taken), flush=True)
    return taken


def as_text(row: dict[str, Any]) -> str:
    return (
        f"CPU per token: {row['before_us']:.0f} us before (commit {shown(row['before_commit'])}), "
        f"{row['after_us']:.0f} us after\nratio {row['ratio']:.2f}, the median of "
        f"{len(row['ratios'])} rounds, {min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record = Record(arguments.seed)
    here = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory(prefix="kvrs-trees-") as directory:
        own = str(arguments.before.absolute() / ".venv/bin/python")
        with (
            Tree(arguments.before.absolute(), own, Path(directory)) as before,
            Tree(here, sys.executable, Path(directory)) as after,
        ):
            print("us of CPU per token: before, after")
            taken = asyncio.run(
                measure([before, after], arguments.rounds, arguments.seconds, arguments.seed)
            )
    ratios = [new / old for old, new in zip(*taken, strict=True)]
    ratio = statistics.median(ratios)
    row = {
        "before_us": statistics.median(taken[0]),
        "after_us": statistics.median(taken[1]),
        "ratio": ratio,
        "ratios": ratios,
        "before_commit": commit_of(arguments.before),
    }
    print(as_text(row))
    record.keep(arguments.out, "cpu", row, as_text(row))
    return 0 if ratio <= MOST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
