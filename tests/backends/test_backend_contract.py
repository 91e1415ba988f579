"""The contract that every backend fulfils, through the one interface that a proxy uses
(`kvrs/proxy/backends/backend.py`).

The same suite runs over the embedded engine, DistServe with its patches, vLLM, SGLang, and scripted
servers of both. What an engine does not declare among its capabilities it need not do; what it
declares, it must.
"""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from kvrs.config.cluster import Backend as Engine
from kvrs.core.model import actions as act
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability, LeaseUpdate, Role
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.backends.backend import RefusedError
from tests.backends.conversations import D0, D1, P0, PATIENCE_S, BackendCluster, Conversation

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("systems")]

PROMPT = [2 + (7 * n) % 90 for n in range(70)]  # Some full pages, and part of one.
TOKENS = 24
LONG = 400  # Long enough to be ended before it is done.


async def whole(system: BackendCluster) -> list[int]:
    """The oracle run: the decode instance on the other node computes everything itself."""
    return await system.talk(PROMPT, TOKENS).ids(D1)


async def test_instances_report_their_identity(system: BackendCluster) -> None:
    """The identity is the configured one, of one model, and the same at a second request."""
    configured = {
        instance.id: (node.id, instance.role)
        for node, instance in system.cluster.config.cluster.instances()
    }

    assert {name: (info.node, info.role) for name, info in system.infos.items()} == configured
    assert {name: info.id for name, info in system.infos.items()} == {
        name: name for name in configured
    }
    assert (
        len({(info.model, info.fingerprint, info.geometry) for info in system.infos.values()}) == 1
    )
    for name, info in system.infos.items():
        assert (await system.backends[name].info()).epoch == info.epoch
        assert info.own_prefill is None or system.infos[info.own_prefill].role is Role.PREFILL


async def test_a_hand_off_gives_the_oracles_stream(system: BackendCluster) -> None:
    """Prefill computes the prompt, decode gets its KV and goes on: as if one had done it all."""
    expected = await whole(system)
    talk = system.talk(PROMPT, TOKENS)
    if system.joins:
        assert await talk.begun() == expected
        return

    answer = await talk.prefill()
    assert list(answer.prompt_ids) == PROMPT
    assert answer.transfer is not None
    async with talk.decode(D0, answer.transfer) as reader:
        ids = await reader.read()

    assert (ids, len(ids), reader.finish_reason) == (expected, TOKENS, "length")


async def test_a_text_prompt_is_tokenised_by_an_engine(system: BackendCluster) -> None:
    """Whose ids a proxy has before the first token: by prefill's answer, or by the stream's first
    event where it is one call.
    """
    text, own = "a short prompt of text", system.infos[D0].own_prefill
    talk = system.talk(text, TOKENS)

    if own is None and not system.joins:
        answer = await talk.prefill()
        prompt_ids, ids = list(answer.prompt_ids), await talk.ids(D0, answer.transfer)
    else:
        async with talk.decode(D0) as reader:
            await reader.read(1)
            assert reader.prompt_ids is not None
            prompt_ids, ids = reader.prompt_ids, await reader.read()

    assert await system.talk(prompt_ids, TOKENS).ids(D1) == ids


@pytest.mark.parametrize("produced", [1, 7, TOKENS - 1])
async def test_a_history_is_continued_elsewhere(system: BackendCluster, produced: int) -> None:
    """Prompt and produced ids at another decode instance: recomputed, the tail is the tail."""
    expected = await whole(system)

    tail = await system.talk(PROMPT, TOKENS, expected[:produced]).ids(D0)

    assert tail == expected[produced:]


async def test_a_history_is_handed_off_again(system: BackendCluster) -> None:
    """The whole of it at prefill, then at another decode instance."""
    expected = await whole(system)
    talk = system.talk(PROMPT, TOKENS, expected[:9])

    assert await talk.begun() == expected[9:]


async def test_many_streams_at_once_do_not_disturb_each_other(system: BackendCluster) -> None:
    prompts = [PROMPT[n:] + PROMPT[:n] for n in range(6)]

    one_by_one = [await system.talk(prompt, TOKENS).ids(D1) for prompt in prompts]
    together = await asyncio.gather(*(system.talk(prompt, TOKENS).ids(D0) for prompt in prompts))

    assert together == one_by_one


async def test_the_load_moves_with_the_streams(system: BackendCluster) -> None:
    """And names the epoch that the instance is in."""
    async with system.talk(PROMPT, LONG).decode(D0) as reader:
        await reader.read(2)
        report = await system.load(D0, lambda report: report.running > 0)
        assert report.epoch == system.infos[D0].epoch

    await system.load(D0, lambda report: report.running == 0)


async def test_a_stream_that_is_closed_ends_in_the_engine(system: BackendCluster) -> None:
    """Its pages are free again: they would be missing to others."""
    before = await system.load(D0, lambda report: report.running == 0)

    for _ in range(3):
        async with system.talk(PROMPT, LONG).decode(D0) as reader:
            await reader.read(2)

    await system.load(
        D0, lambda report: report.running == 0 and report.free_pages >= before.free_pages - 1
    )


async def test_a_wrong_field_is_refused_by_name(system: BackendCluster) -> None:
    """In the form that clients read, and it fails nothing."""
    for name, value in (("max_tokens", 0), ("temperature", -1)):
        with pytest.raises(RefusedError) as refused:
            async with system.talk(PROMPT, TOKENS).decode(D0, **{name: value}) as reader:
                await reader.read()

        said = msgspec.json.decode(refused.value.body)["error"]
        assert 400 <= refused.value.status < 500
        assert name in f"{said.get('param')} {said['message']}"

    assert len(await whole(system)) == TOKENS


async def test_a_prompt_that_is_no_prompt_is_refused(system: BackendCluster) -> None:
    with pytest.raises(RefusedError):
        await system.talk([10**9], TOKENS).begun()


async def test_an_engine_that_finds_computed_prefixes_says_that_it_does(
    system: BackendCluster,
) -> None:
    """PREFIX_CACHE: prompts go there for it (`policy.route: prefix`)."""
    prompt = PROMPT * 4
    talk = system.talk([*prompt, 5], TOKENS)
    if system.joins:
        await system.talk(prompt, TOKENS).begun()
        await talk.begun()
        assert len(talk.found) == 1
    else:
        await system.talk(prompt, TOKENS).prefill()
        talk.found.append((await talk.prefill()).reused_tokens or 0)

    assert system.can(P0, Capability.PREFIX_CACHE) or talk.found == [0]


async def test_what_is_retained_is_kept_under_its_lease(system: BackendCluster) -> None:
    """With RETAIN: kept while the lease is renewed, then dropped."""
    if not system.can(P0, Capability.RETAIN):
        with pytest.raises(UpstreamError):
            await system.backends[P0].leases(LeaseUpdate(1.0))
        return
    talk, unknown = system.talk(PROMPT, TOKENS), StreamId("unknown")
    await talk.prefill()
    backend, stream = system.backends[P0], talk.journal.stream

    first = await backend.leases(LeaseUpdate(30.0, renew=[stream, unknown]))
    released = await backend.leases(LeaseUpdate(30.0, release=[stream]))
    last = await backend.leases(LeaseUpdate(30.0, renew=[stream]))

    assert (first.unknown, released.unknown, last.unknown) == ([unknown], [], [stream])


async def test_retained_pages_are_fetched_by_another(system: BackendCluster) -> None:
    """With PULL_PAGES and RETAIN: the way of a migration."""
    if not (system.can(D1, Capability.PULL_PAGES) and system.can(P0, Capability.RETAIN)):
        pytest.skip("this engine fetches no pages")
    expected = await whole(system)
    talk = system.talk(PROMPT, TOKENS)
    await talk.prefill()
    pages = len(PROMPT) // system.infos[P0].geometry.page_size_tokens

    talk.journal.output_ids, talk.attempt = packed(expected[:5]), 2
    run = act.PageRange(P0, 0, pages, system.infos[P0].epoch)
    tail = await talk.ids(D0, None, [run])

    assert tail == expected[5:]


async def test_what_was_fetched_is_counted_for_its_attempt(system: BackendCluster) -> None:
    """With PULL_PAGES: tokens that came and were used, and those computed in their place."""
    if not system.can(D1, Capability.PULL_PAGES):
        pytest.skip("this engine fetches no pages")
    if system.cluster.config.cluster.backend is Engine.DISTSERVE:
        pytest.skip("DistServe does not count them")
    # The salt keeps the target from having them itself.
    expected, talk = await whole(system), system.talk(PROMPT, TOKENS, cache_salt="apart")
    page_size = system.infos[P0].geometry.page_size_tokens
    pages, holder, epoch = len(PROMPT) // page_size, P0, system.infos[P0].epoch
    await talk.prefill()

    talk.journal.output_ids, talk.attempt = packed(expected[:5]), 2
    await talk.ids(D1, None, [act.PageRange(holder, 0, pages, epoch)])

    fetches = (await system.backends[D1].load()).fetches
    (fetch,) = [each for each in fetches if each.stream == talk.journal.stream]
    assert (fetch.owner_epoch, fetch.attempt) == (0, 2)
    assert fetch.loaded_tokens >= pages * page_size
    assert fetch.loaded_tokens + fetch.computed_tokens == len(PROMPT) + 5


async def test_a_fence_ends_lower_attempts(system: BackendCluster) -> None:
    """With FENCE: lower attempts that run are ended, later ones are refused, and the new epoch
    shows it.
    """
    backend = system.backends[D0]
    if not system.can(D0, Capability.FENCE):
        with pytest.raises(UpstreamError):
            await backend.fence({StreamId("any"): (0, 2)})
        return
    talk, other = system.talk(PROMPT, LONG), system.talk(PROMPT, TOKENS)
    async with talk.decode(D0) as reader:
        await reader.read(2)

        info = await backend.fence({talk.journal.stream: (0, 2)})

        with pytest.raises(UpstreamError):
            await reader.read()
    assert info.epoch > system.infos[D0].epoch
    with pytest.raises(UpstreamError):
        await talk.ids(D0)
    assert len(await other.ids(D0)) == TOKENS
    talk.attempt = 2
    async with talk.decode(D0) as reader:
        assert len(await reader.read(2)) >= 2
    await system.meet()


async def test_a_death_ends_its_streams_and_its_watch(system: BackendCluster) -> None:
    """They end at once with an UpstreamError; the instance comes back in a higher epoch."""
    before = system.infos[D0]
    async with system.talk(PROMPT, LONG).decode(D0) as reader:
        await reader.read(2)
        watch = asyncio.create_task(system.load(D0, lambda _: False))
        await asyncio.sleep(0.2)  # It watches.

        system.cluster.kill(D0, before.worker_pids)

        with pytest.raises(UpstreamError):
            await reader.read()
        with pytest.raises(UpstreamError):
            await watch
    await _back(system, D0, lambda: system.cluster.bring_back(D0))
    assert await system.talk(PROMPT, TOKENS).ids(D0) == await whole(system)


async def test_a_dead_prefill_takes_nothing_along(system: BackendCluster) -> None:
    """A stream that decodes goes on, and its prompt can be computed again when it is back."""
    expected = await whole(system)
    talk = system.talk(PROMPT, TOKENS)
    transfer = None if system.joins else (await talk.prefill()).transfer
    async with talk.decode(D0, transfer) as reader:
        await reader.read(1)
        system.cluster.kill(P0, system.infos[P0].worker_pids)
        ids = await reader.read()

    assert ids == expected
    with pytest.raises(UpstreamError):
        await _until_it_fails(system.talk(PROMPT, TOKENS))
    await _back(system, P0, lambda: system.cluster.bring_back(P0))
    assert await system.talk(PROMPT, TOKENS).begun() == expected


async def _until_it_fails(talk: Conversation) -> None:
    """A killed process may have answered an earlier request."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await talk.begun()


async def _back(system: BackendCluster, name: InstanceId, bring_back: Callable[[], None]) -> None:
    before = system.infos[name].epoch
    await asyncio.to_thread(bring_back)
    await system.back(name, above_epoch=before)
    await system.meet()
