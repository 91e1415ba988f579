"""The oracle of cut streams, with some cuts of every stream."""

import asyncio
import random

import pytest

from kvrs.proxy.wire.exactness import inexact_features
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, read
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Scripted
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.cuts import Case, Point, cases, comparable, encoded, points, try_point

pytestmark = pytest.mark.network

CASES = cases()
CUTS_PER_STREAM = 3
CUTS_AT_THE_END = 2
# More than these delay one another beyond the limit of a hang on a busy machine, since clients,
# proxy and engines share one process.
AT_ONCE = 24


def is_exact_on_plain_engines(case: Case) -> bool:
    asked = read(CHAT if case.path == CHAT.path else COMPLETIONS, encoded(case))
    return inexact_features(asked, has_tokenizer=True) == ()


async def wrong_answers(system: ProxyCluster, tried: list[Case], seed: str) -> list[str]:
    """Cut each stream in a few places; what their clients could have noticed."""
    chosen = random.Random(seed)
    cuts: list[Point] = []
    for case in tried:
        possible = await points(system.http, system.url, system.script, case)
        cuts += chosen.sample(possible, CUTS_PER_STREAM)
        # Most can go wrong where little is left: before the finish, the usage and the end.
        last = max(point.cut.event for point in possible)
        cuts += chosen.sample(
            [point for point in possible if point.cut.event >= last - 2], CUTS_AT_THE_END
        )
    places = asyncio.Semaphore(AT_ONCE)

    async def tried_alone(number: int, point: Point) -> str | None:
        async with places:
            return await try_point(system.http, system.url, system.script, point, f"cut {number}")

    faults = await asyncio.gather(
        *(tried_alone(number, point) for number, point in enumerate(cuts))
    )
    return [
        f"{p.case.name}, {p.cut}: {fault}"
        for p, fault in zip(cuts, faults, strict=True)
        if fault is not None
    ]


def test_the_streams_are_many_and_different() -> None:
    """At least 40, no two alike."""
    assert len(CASES) >= 40
    assert (
        len({case.name for case in CASES}) == len({encoded(case) for case in CASES}) == len(CASES)
    )


@pytest.mark.parametrize(
    "separate", [False, True], ids=["finish with the last token", "finish apart"]
)
async def test_a_client_cannot_tell_a_cut_stream_from_a_whole_one(
    build: ProxyClusterBuilder, model: str, separate: bool
) -> None:
    """Byte for byte, times and ids aside, wherever and however the stream is cut."""
    system = await build(proxy={"token_gap_s": 2.0}, model=model)
    system.script.separate_finish = separate

    assert await wrong_answers(system, CASES, f"{separate}") == []


async def test_exact_engines_need_no_tokenizer_at_the_proxy(build: ProxyClusterBuilder) -> None:
    """They continue text themselves; also where nothing but the end of a stream is missing."""
    system = await build(proxy={"token_gap_s": 2.0})
    system.script.separate_finish = True

    assert (
        await wrong_answers(system, [case for case in CASES if case.name != "echo whole"], "none")
        == []
    )


async def test_what_is_said_to_be_exact_on_plain_engines_is(
    build: ProxyClusterBuilder, model: str
) -> None:
    """Text, stop strings, token limits and usage are continued by the proxy where the engine begins
    anew.
    """

    def prepare(instances: dict[str, Scripted]) -> None:
        for instance in instances.values():
            instance.capabilities = []

    system = await build(
        proxy={"token_gap_s": 2.0, "inexact": "refuse"},
        model=model,
        prepare=prepare,
    )
    tried = [case for case in CASES if is_exact_on_plain_engines(case)]

    assert len(tried) >= 20
    assert await wrong_answers(system, tried, "plain") == []


def test_the_comparison_sees_what_a_client_would() -> None:
    """A lost, a repeated and a foreign event all show."""
    case = next(case for case in CASES if case.name == "latin ids")
    events = [
        b'data: {"id":"cmpl-%032d","created":%d,"choices":[%d]}\n\n' % (0, 1, number)
        for number in range(3)
    ]
    end = b"data: [DONE]\n\n"
    whole = comparable(b"".join(events) + end, case)

    assert comparable(b"".join(events).replace(b":1,", b":2,") + end, case) == whole
    assert comparable(b"".join(events[:2]) + end, case) != whole
    assert comparable(b"".join([*events, events[2]]) + end, case) != whole
    for broken in (
        b"".join(events),
        b"".join(events) + end + end,
        events[0].replace(b"000", b"111") + events[1] + end,
    ):
        with pytest.raises(AssertionError):
            comparable(broken, case)
