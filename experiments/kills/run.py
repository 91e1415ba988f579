"""Streams while something dies: no token may be lost, come twice or be another one.

python -m experiments.kills.run VICTIMS CLUSTER [options]
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.command_line import parser_of
from experiments.kills import (
    drill,
    poison,
    proxies,
    replay_targets,
    replayed,
    simulated,
    vllm,
    worlds,
)
from kvrs.config.backup import BackupMode
from kvrs.config.distserve import HOME_ENV
from kvrs.config.policy import PolicyName
from kvrs_testkit.sglang_servers import PYTHON_ENV as SGLANG_PYTHON_ENV
from kvrs_testkit.vllm_servers import PYTHON_ENV

OPTIONS: dict[str, dict[str, Any]] = {
    "policy": {"type": PolicyName, "choices": list(PolicyName)},
    "backup": {"type": BackupMode, "choices": list(BackupMode)},
    "load": {"choices": ["generated", "trace"], "help": "trace: Mooncake's conversations"},
    "api": {"choices": ["completions", "responses", "messages"]},
    "option": {"choices": list(vllm.POLICIES), "help": "default: one behind the other"},
    "streams": {"type": int, "help": "of each series"},
    "kills": {"type": int},
    "proxies": {"type": int, "choices": range(2, 9), "metavar": "2..8"},
    "mirror": {"choices": ["async", "sync"]},
    "mix": {"action": "store_true", "help": "with each proxy a decode instance"},
    "experts": {"action": "store_true", "help": "of a mixture, with copies that move"},
    "on_nodes": {"action": "store_true", "help": "stages on two nodes"},
    "gpu": {"action": "store_true", "help": "servers share one, without NIXL"},
    "worlds": {"type": int, "help": "pools of servers that share the kills, at the same time"},
    "replays": {"action": "store_true", "help": "of grammars, tools, penalties, seeds"},
    "forced": {"action": "store_true", "help": "of replays: grammars and tools alone"},
    "stock": {"action": "store_true", "help": "of replays: servers without the processor"},
    "thoughts": {"action": "store_true", "help": "of replays: a reasoning parser"},
    "targets": {"action": "store_true", "help": "of replays hang or die, too"},
    "seeds": {"type": int, "help": "so many series or worlds"},
    "limit_s": {"type": float, "help": "no kill comes later"},
}


@dataclass(frozen=True, slots=True)
class Part:
    """The program of one combination, and the options that it takes beside seed and out."""

    run: Callable[[argparse.Namespace], int]
    options: tuple[str, ...]
    needs: str = ""  # A variable of the environment.


def _decode(options: argparse.Namespace) -> int:
    return drill.run("decode-trace" if options.load == "trace" else "decode", options)


def _vllm(options: argparse.Namespace) -> int:
    if options.targets:
        return replay_targets.run(options)
    return replayed.run(options) if options.replays else vllm.run(options)


PARTS: dict[tuple[str, str], Part] = {
    ("decode", "embedded"): Part(_decode, ("policy", "load", "streams")),
    ("decode", "vllm"): Part(
        _vllm,
        (
            *("option", "streams", "kills", "gpu", "worlds", "replays", "forced", "stock"),
            *("thoughts", "limit_s", "targets"),
        ),
        PYTHON_ENV,
    ),
    ("decode", "sglang"): Part(replayed.run, ("kills", "thoughts", "limit_s"), SGLANG_PYTHON_ENV),
    ("decode", "simulated"): Part(simulated.run, ("streams", "seeds")),
    ("rank", "embedded"): Part(
        partial(drill.run, "rank"), ("policy", "streams", "experts", "on_nodes")
    ),
    ("proxy", "embedded"): Part(proxies.run, ("api", "kills", "proxies", "mirror", "mix")),
    ("everything", "embedded"): Part(partial(drill.run, "everything"), ("policy", "streams")),
    ("everything", "distserve"): Part(
        partial(drill.run, "distserve"), ("policy", "backup", "streams"), HOME_ENV
    ),
    ("everything", "simulated"): Part(worlds.run, ("seeds",)),
    ("poison", "simulated"): Part(poison.run, ("seeds",)),
}


def parsed(words: list[str] | None = None) -> tuple[Part, argparse.Namespace]:
    """The combination, and its options; ends with status 2 for one that it does not take."""
    parser = parser_of(__doc__, __file__, seed=1)
    parser.epilog = "\n".join(
        f"{victims} {cluster}: {' '.join(map(_flag, part.options))}"
        for (victims, cluster), part in PARTS.items()
    )
    parser.add_argument("victims", choices=list(dict.fromkeys(victims for victims, _ in PARTS)))
    parser.add_argument("cluster", choices=list(dict.fromkeys(cluster for _, cluster in PARTS)))
    for name, settings in OPTIONS.items():
        parser.add_argument(_flag(name), **settings)
    options = parser.parse_args(words)
    part = PARTS.get((options.victims, options.cluster))
    if part is None:
        parser.error(f"no series of {options.victims} {options.cluster}; there are those below")
    given = {name for name in OPTIONS if getattr(options, name)}
    if unknown := sorted(given - {*part.options}):
        parser.error(f"{options.victims} {options.cluster} takes no {_flag(unknown[0])}")
    if options.gpu and not (options.replays or options.option == "recompute"):
        parser.error("--gpu is for --replays and --option recompute")
    kinds = options.forced or options.stock or options.thoughts
    if kinds and not (options.replays or options.cluster == "sglang"):
        parser.error("--forced, --stock and --thoughts are for --replays")
    if options.worlds and not (options.option and options.kills):
        parser.error("--worlds is for --option with --kills")
    if options.limit_s and not options.kills:
        parser.error("--limit-s is for --kills")
    if part.needs and part.needs not in os.environ:
        parser.error(f"{part.needs} is not set")
    return part, options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def main() -> int:
    part, options = parsed()
    return part.run(options)


if __name__ == "__main__":
    sys.exit(main())
