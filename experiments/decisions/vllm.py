"""Predicted beside real costs in front of real vLLM on this machine's CPU.

    KVRS_VLLM_PYTHON=.venv-vllm/bin/python python -m experiments.decisions.vllm
        [--options recompute migrate] [--recoveries 30] [--seed 0] [--quick] [--out DIR]

The profile is measured there first, as `kvrs profile --url` does. Recomputes: two servers that
compute prompts themselves. Migrations: a prefill server, from whose prefix cache NIXL brings the
whole history. In each wave eight streams run when all processes of one decode server get SIGKILL.
It is started again behind the wave.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.command_line import parser_of
from experiments.decisions.points import Point, Wave, conditions, missed, row_of, show, wave
from experiments.record import Record
from kvrs.config.policy import PolicyName
from kvrs.net.admin import AdminClient
from kvrs.proxy.backends.vllm_profile import VllmProfileOptions, run_vllm_profile
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.traces.records import ReplayRequest
from kvrs_testkit.vllm_servers import (
    HANDED_OVER,
    PYTHON_ENV,
    START_TIMEOUT_S,
    VllmServers,
    vllm_config,
)

# By option: the nodes with their servers, and the policy.
SERVERS: dict[str, Mapping[str, Sequence[str]]] = {
    "recompute": {"n0": ("d0",), "n1": ("d1",)},
    "migrate": HANDED_OVER,
}
POLICIES = {"recompute": PolicyName.ALWAYS_RECOMPUTE, "migrate": PolicyName.ALWAYS_MIGRATE}
# A server's cache has room for 32,768 tokens: those of all streams of a wave.
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, (300, 900), 800
PROFILED_TOKENS = 1024
UNDER_WAY_TOKENS = (20, 80)
ARRIVALS_S = 0.5
_IDS = (3, 250)
_LOOK_S = 0.2


def missing(python: str | None) -> str | None:
    """Return why vLLM cannot be run; None: it can."""
    if python is None:
        return f"{PYTHON_ENV} is not set: the interpreter of an environment with vLLM"
    return None if Path(python).is_file() else f"{PYTHON_ENV}: no file {python}"


def without_nixl(python: str) -> str | None:
    """Return why nothing can be handed over; None: it can."""
    code = "import nixl._api"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def measured_profile(servers: VllmServers, directory: Path) -> Path:
    """Measure prefills of the first server that computes prompts."""
    prefills = [name for name in servers.names if name.startswith("p")] or servers.names
    asked = VllmProfileOptions(
        url=servers.url(prefills[0]),
        out=directory / "measured.json",
        model=servers.model,
        longest_tokens=PROFILED_TOKENS,
    )
    return run_vllm_profile(asked, os.environ)


def requests_of(rng: random.Random) -> list[ReplayRequest]:
    return [
        ReplayRequest(
            rng.uniform(0, ARRIVALS_S),
            tuple(rng.choices(range(*_IDS), k=rng.randint(*PROMPT_TOKENS))),
            OUTPUT_TOKENS,
        )
        for _ in range(STREAMS)
    ]


def waves(
    option: str, python: str, recoveries: int, seed: int, profiles: dict[str, Any]
) -> Iterator[Wave]:
    """Yield waves until the option has so many recoveries. `profiles` gets the measured prefills of
    its servers.
    """
    rng, found = random.Random(f"decisions/vllm/{option}/{seed}"), 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with VllmServers(vllm_config(directory, SERVERS[option]), python) as servers:
            servers.start_all()
            config = servers.config
            path = measured_profile(servers, directory)
            profiles[option] = json.loads(path.read_text())["prefill"]
            measured = config.profiles.model_copy(update={"prefill": str(path)})
            policy = config.policy.model_copy(update={"name": POLICIES[option]})
            config = config.model_copy(update={"profiles": measured, "policy": policy})
            servers.start_proxy(config)
            url = f"http://{config.proxy.host}:{config.proxy.port}"
            admin_url = f"http://{config.proxy.admin_host}:{config.proxy.admin_port}"
            while found < recoveries:
                asyncio.run(_until_tested(admin_url))
                asked = requests_of(rng)
                tokens = rng.randint(*UNDER_WAY_TOKENS)
                one = asyncio.run(wave(url, admin_url, asked, tokens, servers.kill))
                yield one
                if not one.rows:
                    raise RuntimeError(f"{option}: a death without a recovery")
                found += len(one.rows)
                if found < recoveries:
                    servers.start(one.victim)
                    servers.wait_ready(one.victim)


async def _until_tested(admin_url: str) -> None:
    async with AdminPort(AdminClient(admin_url)) as port:
        await port.wait_all_up(START_TIMEOUT_S, _LOOK_S, tested=True)


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--options", nargs="+", choices=[*SERVERS], default=[*SERVERS])
    parser.add_argument("--recoveries", type=int, default=30, help="of each option, at least")
    parser.add_argument("--quick", action="store_true", help="one wave of each option")
    parser.add_argument("--python", default=os.environ.get(PYTHON_ENV))
    options = parser.parse_args()
    if why := missing(options.python):
        print(f"skipped: {why}", file=sys.stderr)
        return 2
    recoveries = 1 if options.quick else options.recoveries
    record, console = Record(options.seed), Console(record=True, width=120)
    points, rounds, skipped = list[Point](), list[dict[str, Any]](), dict[str, str]()
    profiles = dict[str, Any]()
    for option in options.options:
        if option == "migrate" and (why := without_nixl(options.python)):
            skipped[f"{option} skipped"] = why
            continue
        for one in waves(option, options.python, recoveries, options.seed, profiles):
            found = one.points()
            points += found
            rounds.append(row_of(option, one, found))
            print(f"{option}: {len(found)} recoveries", flush=True)
    if not rounds:
        print(*(f"{skip}: {why}" for skip, why in skipped.items()), file=sys.stderr)
        return 2
    figures = {"profiles": profiles, "waves": rounds} | skipped
    show(console, points, points)
    said = [conditions(rounds, options.seed), *(f"{skip}: {why}" for skip, why in skipped.items())]
    console.print("\n".join(said), markup=False, highlight=False)
    wrong = list[str]()
    for option in sorted({each.option for each in points}):
        of = [each for each in points if each.option == option]
        wrong += [f"{option}: {each}" for each in missed(of, of)]
    if failed := sum(each["failed"] for each in rounds):
        wrong.append(f"{failed} streams did not complete")
    console.print("missed:", wrong or "nothing", markup=False, highlight=False)
    figures["missed"] = wrong
    is_void = record.keep(options.out, "vllm", figures, console.export_text())
    return 2 if is_void else 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
