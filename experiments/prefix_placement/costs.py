"""Time of a placement by prefix, of the hashes of a prompt, and memory of the index."""

import gc
import time
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import psutil

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.core.model.cluster_view import (
    BLOCK_BYTES,
    ClusterView,
    Prefix,
    PrefixIndex,
    chain,
    room_tokens,
)
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.prefix_routing import with_prefix
from kvrs.core.routing import least_work
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.catalog import prefill_table
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import LoadReport, Role, assumed_instance
from kvrs.proxy.wire.requests import CHAT, prefix_of, read

PACE = "llama-3.1-8b-h100-vllm-tp1"
GEOMETRY = KvGeometry(layers=4, kv_heads=2, head_dim=32, dtype_bytes=4, page_size_tokens=128)
PROMPT_BYTES = 32_768
PROMPT_TOKENS = PROMPT_BYTES // 4
BARS = {"hash_us": 10.0, "64": 20.0, "1000": 50.0, "million_mb": 120.0}
_REPEATS, _TENTH = 300, 10
_BLOCKS = 1_000_000


def cluster(count: int, having: int, *, first_has: bool) -> tuple[ClusterView, Stream]:
    """Prefill instances of which the last ones have the prompt, all but one block of it; with
    `first_has` all others have its first block.
    """
    view, table = ClusterView(1e9), prefill_table(PACE)
    prompt = prefix_for(0)
    short = Prefix(prompt.hashes[:1], BLOCK_BYTES)
    for number in range(count):
        name = InstanceId(f"p{number:04}")
        info = assumed_instance(name, NodeId(f"n{number}"), Role.PREFILL, GEOMETRY)
        member = view.add(Member.of(info, table))
        member.load = LoadReport(1, 0, 0, 8192, 0.0, [])
        view.prefill_order.note_queue(member, 0.01 * (number % 50))
        if number >= count - having:
            view.prefixes.note(member, Prefix(prompt.hashes[:-1], prompt.size_bytes), PROMPT_TOKENS)
        elif first_has:
            view.prefixes.note(member, short, PROMPT_TOKENS // len(prompt.hashes))
    return view, Stream(StreamId("s"), prompt_tokens=PROMPT_TOKENS, prefix=prompt)


def prefix_for(number: int) -> Prefix:
    text = Random(number).randbytes(PROMPT_BYTES)
    return Prefix(chain(0, text), len(text))


def tenth_us(call: Callable[[], Any]) -> float:
    """The tenth percentile of many calls: what others do on the machine only adds."""
    times = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return sorted(times)[_REPEATS // _TENTH] * 1e6


def placement_us(count: int, having: int, *, first_has: bool) -> float:
    view, stream = cluster(count, having, first_has=first_has)
    first = least_work(view, stream, is_free=True, barred_too=False)
    assert first is not None
    return tenth_us(lambda: with_prefix(view, stream, first, lambda member: True))


def hash_us() -> float:
    words = Random(1).choices(["the", "of", "and", "placement", "cache", "prompt"], k=8000)
    text = " ".join(words)[: PROMPT_BYTES - 100]
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    parsed = read(CHAT, msgspec.json.encode(body))
    return tenth_us(lambda: prefix_of(parsed))


def million_mb() -> float:
    """Resident memory of a full index of eight instances."""
    process, index = psutil.Process(), PrefixIndex(room_tokens)
    members = []
    for number in range(8):
        info = assumed_instance(InstanceId(f"p{number}"), NodeId("n"), Role.PREFILL, GEOMETRY)
        members.append(Member.of(info, prefill_table(PACE)))
    gc.collect()
    before = process.memory_info().rss
    number, rng = 0, Random(2)
    while len(index) < _BLOCKS:
        hashes = [rng.getrandbits(64) for _ in range(64)]
        index.note(members[number % 8], Prefix(hashes, 64 * BLOCK_BYTES), 64 * 256)
        number += 1
        del hashes
    gc.collect()
    return float(process.memory_info().rss - before) / 1e6


def name_of(count: int, having: int, first_has: bool) -> str:
    others = ", others its first block" if first_has else ""
    return f"{count} instances, {having} have the prompt{others}"


def main() -> int:
    options = parser_of(__doc__, __file__).parse_args()
    record = Record(0)
    memory_mb, hashes_us = million_mb(), hash_us()
    placements_us = {
        name_of(count, having, first_has): placement_us(count, having, first_has=first_has)
        for count in (8, 64, 1000)
        for having in (0, 3, 100)
        for first_has in (False, True)
        if having <= count
    }
    lines = [
        f"hashes of a prompt of {PROMPT_BYTES // 1024} kB: {hashes_us:.1f} us; bar "
        f"{BARS['hash_us']:.0f}",
        f"memory of a million blocks: {memory_mb:.0f} MB; bar {BARS['million_mb']:.0f}",
        "placement behind that by the shortest queue:",
        *(f"  {name}: {us:.1f} us" for name, us in placements_us.items()),
        f"bars: {BARS['64']:.0f} us among 64, {BARS['1000']:.0f} among 1,000",
    ]
    text = "\n".join(lines)
    print(text)
    figures = {"million_mb": memory_mb, "hash_us": hashes_us, "placement_us": placements_us}
    record.keep(options.out, "costs", {"bars": BARS, **figures}, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
