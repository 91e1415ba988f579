"""Backend of unmodified vLLM: its P/D convention (NixlConnector), its identity and its load.

vLLM has no instance protocol. Its identity comes from the configuration, `/v1/models`, `/version`
and `/metrics` (`vllm_metrics.py` tells its processes apart); its load from polling `/health` and
`/metrics`; its death from the end of an idle connection.

Requests to a vLLM server that belong to no stream: its health, its metrics and its engines.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from kvrs.errors import ConfigError, KvrsError, UpstreamError
from kvrs.profiles.guess import guessed_prefill
from kvrs.protocol.instance import (
    Capability,
    FetchReport,
    HandOffReport,
    InstanceInfo,
    KvTransferParams,
    LinkReport,
    LoadReport,
    ModelNames,
    Role,
    SpeculationReport,
    WatchQuestion,
)
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.rows import MAX_AGENTS, PARAMS_FIELD, seal
from kvrs.proxy.backends.backend import Prefilled, RefusedError
from kvrs.proxy.backends.bodies import BYTES_PER_ID, Call, limited
from kvrs.proxy.backends.stock_facts import ConfiguredIdentity, CountedSteps, ListedModels
from kvrs.proxy.backends.stock_peer import Asked, StockPeer, Watched
from kvrs.proxy.backends.vllm_fields import RowLoads, Transfer, checked, with_replay
from kvrs.proxy.backends.vllm_metrics import (
    ProcessIdentity,
    ProcessTotals,
    VllmMetrics,
    engine_mark,
)
from kvrs.proxy.wire.errors import DeniedError, UnusableError
from kvrs.proxy.wire.events import LacksIdsError, check_events
from kvrs.proxy.wire.upstream import EngineLinks, EventReader, Reader
from kvrs.proxy.wire.watchdog import SilentError, Watchdog, awake_since_s
from kvrs.transfer.meter import FetchedHandOff, HandOffMeter, Pulled

# Paths of `--enable-fault-tolerance`, by version. With that option `/health` still says 200 while
# an engine waits for an orchestrator, although streams stand still and new requests get 503.
_FT_PATHS = ("/fault_tolerance/status", "/v1/fault_tolerance/status")
_HEALTH = "/health"
_FT_STOPPED = ("unhealthy", "paused", "dead")


class _FtEngine(msgspec.Struct):
    status: str


class _FtStatus(msgspec.Struct):
    engines: list[_FtEngine]


class VllmServer(StockPeer):
    ENGINE = "vLLM"

    def __init__(self, links: EngineLinks, url: str) -> None:
        super().__init__(links, url)
        # The one of `_FT_PATHS` that answered; None: fault tolerance is off.
        self._ft_path: str | None = None
        self._process = ProcessIdentity()
        self._totals = ProcessTotals()
        self._meter = HandOffMeter()
        self._steps = CountedSteps()

    async def _read(self, path: str) -> bytes:
        status, answer = await self.pool.ask(path, None)
        if status == 200:
            return answer
        if status >= 500:
            of = ": its engine is dead" if path == _HEALTH else ""
            raise UpstreamError(f"HTTP {status} for {path}{of}")
        raise UnusableError(f"another server than vLLM answers there: HTTP {status} for {path}")

    async def _metrics(self) -> VllmMetrics:
        return VllmMetrics((await self._read("/metrics")).decode(errors="replace"))

    def _epoch(self, metrics: VllmMetrics, other_mark: str | None) -> int:
        """Return the epoch of the process that has just answered `/metrics`."""
        return self._process.read(
            metrics.started_s,
            other_mark,
            metrics.tokens,
            now_s=time.monotonic(),
            wall_s=time.time(),
        )

    async def kv_received(self) -> float | None:
        metrics = await self._metrics()
        if metrics.received_bytes is None or metrics.hand_offs is None:
            return None
        return self._counts(metrics)[0].transferred_bytes

    def _counts(self, metrics: VllmMetrics) -> tuple[HandOffReport, SpeculationReport, float]:
        """Return the counts of hand-offs and drafts, added over all processes behind the port, and
        the time of a recent step; 0: vLLM does not report the count.
        """
        hand_offs = metrics.hand_offs or HandOffReport()
        drafts = metrics.drafts or SpeculationReport("engine", active=True)
        sums = self._totals.add(
            self._process.epoch,
            metrics.started_s,
            (
                *msgspec.structs.astuple(hand_offs),
                *(drafts.steps, drafts.proposed, drafts.accepted),
                *metrics.token_intervals,
            ),
        )
        *counts, steps, proposed, accepted, intervals, took_us = sums
        changes = {"steps": steps, "proposed": proposed, "accepted": accepted}
        step_s = self._steps.read(self._process.epoch, intervals, took_us / 1e6)
        return HandOffReport(*counts), msgspec.structs.replace(drafts, **changes), step_s

    async def _find_ft_path(self) -> None:
        self._ft_path = None
        for path in _FT_PATHS:
            status, _ = await self.pool.ask(path, None)
            if status == 200:
                self._ft_path = path
                return

    async def _healthy(self) -> None:
        await self._read(_HEALTH)

    async def _stopped_engines(self) -> str:
        """Ask the server's fault tolerance for engines that have stopped; return what it says of
        them, empty if all run.
        """
        if self._ft_path is None:
            return ""
        try:
            status = msgspec.json.decode(await self._read(self._ft_path), type=_FtStatus)
        except UNREADABLE as error:
            raise UnusableError(f"unexpected answer to {self._ft_path}: {error}") from None
        stopped = [each.status for each in status.engines if each.status in _FT_STOPPED]
        if not stopped:
            return ""
        return (
            f"{len(stopped)} of its {len(status.engines)} engines: {stopped[0]}, by {self._ft_path}"
        )

    def _measured_links(self, metrics: VllmMetrics) -> list[LinkReport]:
        """Return the bandwidths of the links over which this instance has fetched this proxy's
        hand-offs.
        """
        counts, now_s = metrics.hand_offs, time.monotonic()
        if counts is not None:
            pulled = Pulled(counts.transfers, counts.transferred_bytes, metrics.transfer_s)
            self._meter.counted(pulled, now_s, metrics.started_s)
        measured = self._meter.measurements(now_s)
        return [LinkReport(source, *found) for source, found in measured.items()]

    def _begin_pull(self, call: Call, bytes_per_token: int) -> FetchedHandOff | None:
        """Tell the bandwidth meter that the call fetches a hand-off; None: the call
        fetches none.
        """
        hand_off = call.hand_off
        if hand_off is None:
            return None
        size_bytes = hand_off.tokens * bytes_per_token
        now_s = time.monotonic()
        pull = hand_off.pull = FetchedHandOff(hand_off.node, size_bytes, hand_off.ranks, now_s)
        self._meter.begins(pull)
        return pull


# Seconds between reads of `/metrics`, longer than between reads of `/health`: the answer is 60 kB
# of text and takes the server milliseconds. A load report is at most this old.
_METRICS_INTERVAL_S = 1.0
# Ages in seconds at which a request for `/health`, and one for anything else, count as late.
_LIFE_LATE_S = 2.0
_LATE_S = 3.0
# Time limit of the probe at start-up: the first request of a vLLM may take half a minute.
_PROBE_TIMEOUT_S = 60.0
_PROBE_IDS = [1]
_COMPLETIONS = "/v1/completions"
# Message of the error event that ends a request whose KV vLLM could not load; a dead engine sends a
# longer message.
_LOAD_FAILED = "Internal server error"
# Seconds for which a hand-off may be used, a part of `kv_lease_duration` (30 s, at least 10 s).
# After the lease the blocks at prefill may belong to another stream, and decode would not notice.
_HAND_OFF_S = 6.0
# Seconds after which a request that only frees a hand-off is aborted if it still waits: it has
# reached the engine by then. Further looks, and the time by which it is aborted in any case: vLLM
# gives up a pull that hangs itself.
_ABORTED_AFTER_S = 1.5
_LOOK_AGAIN_S = 1.0
_ABORTED_BY_S = 120.0


class _Version(msgspec.Struct):
    version: str


class VllmBackend(VllmServer):
    """Requests to one vLLM server."""

    UNAUTHORISED = "its --api-key is not what the proxy's environment has in KVRS_VLLM_API_KEY"

    def __init__(
        self, links: EngineLinks, url: str, identity: ConfiguredIdentity, params_key: bytes
    ) -> None:
        super().__init__(links, url)
        self._identity = identity
        self._params_key = params_key
        # Identity of the process that was probed last; None: none yet.
        self._info: InstanceInfo | None = None
        # Reason not to use the instance, which denied a one-token request. None: usable.
        self._denied: str | None = None
        self._row_loads = RowLoads(identity.node)
        self._is_watched = False  # True: reports are being read, so the end of the process shows.
        self._last_metrics: VllmMetrics | None = None  # Last `/metrics` read for an identity.

    # Requests for the identity and the load.

    async def info(self) -> InstanceInfo:
        await self._healthy()
        if not self._is_watched:
            # Nothing has shown since the last look that it is still the same process.
            self._process.connection_ended()
        metrics = await self._facts()
        epoch = self._epoch(metrics, await self._other_mark(metrics))
        if self._info is None or self._info.epoch != epoch or self._denied is not None:
            info = await self._meet(epoch, metrics)
            await self._find_ft_path()
            await self._check_engines()
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await self._probe(info)
                    info = await with_replay(info, super().decode)
            except TimeoutError:
                raise UpstreamError(
                    f"did not answer one token's request within {_PROBE_TIMEOUT_S:g} s"
                ) from None
            except RefusedError as error:
                raise UnusableError(
                    f"it refuses one token's request: {error.body.decode(errors='replace')}"
                ) from None
            self._info, self._denied = info, None
        await self._check_engines()
        return self._info

    async def _check_engines(self) -> None:
        """Check that no engine of the server has stopped. Raises UpstreamError: one has."""
        stopped = ""
        with suppress(UpstreamError):  # A failed question says nothing of the engines.
            stopped = await self._stopped_engines()
        if stopped:
            raise UpstreamError(stopped)

    async def _facts(self) -> VllmMetrics:
        """Return what `/metrics` say of the process. Where they fail, what they said of the last
        one, without its marks, if anything.

        Raises:
            UpstreamError: they have never said anything.
        """
        try:
            with Watchdog(lambda *_: _LATE_S):
                metrics = await self._metrics()
        except SilentError:
            failed = UpstreamError(f"no answer to /metrics within {_LATE_S:g} s")
        except UnusableError:
            raise
        except UpstreamError as error:
            failed = error
        else:
            self._last_metrics = metrics
            return metrics
        if self._last_metrics is None:
            raise UpstreamError(
                f"{failed}; the size of its KV pages is not known without"
            ) from None
        return self._last_metrics.of_unknown_process()

    async def _other_mark(self, metrics: VllmMetrics) -> str | None:
        """Return the mark of a prefill instance's engine, if the process may have been replaced and
        shows no start time. None: no mark is shown, or none is needed.
        """
        if metrics.started_s is not None or not self._process.is_in_doubt:
            return None
        if self._info is None or self._info.role is not Role.PREFILL:
            return None
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                engine = await self._probe(self._info)
        except (UpstreamError, RefusedError, TimeoutError):
            return None  # No mark: the probe of the instance will find the same fault.
        return None if engine is None else engine_mark(engine)

    async def _meet(self, epoch: int, metrics: VllmMetrics) -> InstanceInfo:
        identity = self._identity
        version = await self.control("GET", "/version", None, _Version)
        self.engine_version = version.version
        listed = await self.control("GET", "/v1/models", None, ListedModels)
        name = identity.served_name
        model = listed.named(name)
        if model is None:
            what = "model" if name is None else f"{name!r}, which cluster.served_name asks for"
            raise UnusableError(f"its /v1/models names no {what}")
        if identity.hands_off and not metrics.has_connector:
            raise UnusableError(
                f"it was started without a NixlConnector, which role "
                f"{identity.role.value!r} needs (--kv-transfer-config): "
                "its /metrics have no vllm:nixl_ counters"
            )
        root = model.root or model.id
        try:
            files = identity.files.of(root)
            geometry = files.geometry(metrics.page_size_tokens)
        except ConfigError as error:
            raise UnusableError(str(error)) from None
        return InstanceInfo(
            id=identity.id,
            node=identity.node,
            role=identity.role,
            epoch=epoch,
            pid=0,  # Unknown, since vLLM does not report its process id.
            model=model.id,
            fingerprint=f"vLLM, {root}",
            geometry=geometry,
            max_model_len=model.max_model_len or 0,
            page_port=0,
            capabilities=[Capability.PREFIX_CACHE]
            if metrics.cache.get("enable_prefix_caching") == "True"
            else [],
            prefill=guessed_prefill(files.size()),
            computes_prompts=identity.role is Role.DECODE,
            names=listed.beside(model),
            hand_off_format=metrics.hand_off_format,
            root=root,
            engine=version.version,
        )

    async def _probe(self, info: InstanceInfo) -> str | None:
        """Generate a token as streams do, to find a version that lacks a field; return the engine
        id of an instance that does prefill.

        Raises:
            UnusableError: a field or an ability is missing.
        """
        fields = {
            "model": info.model,
            "prompt": _PROBE_IDS,
            "max_tokens": 1,
            "return_token_ids": True,
        }
        if info.role is Role.PREFILL:
            asked = fields | {
                "temperature": 0,
                "stream": False,
                "ignore_eos": True,
                "kv_transfer_params": KvTransferParams(do_remote_decode=True),
            }
            answer = await super().prefill(Call(_COMPLETIONS, asked))
            if answer.transfer is None:
                raise UnusableError(
                    "prefill answered without kv_transfer_params: it has no connector, or "
                    "one of another kind"
                )
            return self._checked(answer, info).remote_engine_id
        # This request is the first with a seed, which compiles kernels: vLLM warms up its sampler
        # without a seed. A recovered stream must not have to wait for that (vLLM issue 54425).
        asked = fields | {"temperature": 1.0, "top_p": 0.9, "seed": 1, "stream": True}
        events = EventReader()
        await super().decode(Call(_COMPLETIONS, asked), events)
        _check_probe(events.payloads)
        return None

    def _ask_watched(self) -> Watched:
        return Watched(
            life=Asked(WatchQuestion.HEALTH, self._healthy, 0.0, _LIFE_LATE_S),
            figures=Asked(WatchQuestion.METRICS, self.load, _METRICS_INTERVAL_S, _LATE_S),
            others=[
                Asked(WatchQuestion.MODELS, self._listed, _METRICS_INTERVAL_S, _LATE_S),
                *[Asked(WatchQuestion.ENGINES, self._stopped_engines, 0.0, _LATE_S)]
                * (self._ft_path is not None),
            ],
            life_every_s=_METRICS_INTERVAL_S,
        )

    def _beside(self, asked: Watched) -> dict[str, Any]:
        if self._denied is not None:
            raise UnusableError(self._denied)
        models, *engines = asked.others
        if engines and (stopped := engines[0].answer):
            raise UpstreamError(stopped)
        return {"names": models.answer}

    def _connection_ended(self) -> None:
        self._process.connection_ended()

    @property
    def _epoch_now(self) -> int:
        return self._process.epoch

    async def _reports(
        self, interval_s: float, is_awaited: Callable[[], bool]
    ) -> AsyncGenerator[LoadReport]:
        self._is_watched = True
        try:
            async for report in super()._reports(interval_s, is_awaited):
                yield report
        finally:
            self._is_watched = False
            self._process.lost()

    async def _listed(self) -> ModelNames | None:
        """Ask for the names that the server serves now, since adapters come and go while it runs.
        None: the model is not among them, which is judged as it comes up.
        """
        info = self._info
        listed = await self.control("GET", "/v1/models", None, ListedModels)
        model = next((each for each in listed.data if info and each.id == info.model), None)
        if info is None or model is None:
            return None
        names = listed.beside(model)
        if names != info.names:
            self._info = msgspec.structs.replace(info, names=names)
        return names

    async def load(self) -> LoadReport:
        metrics = await self._metrics()
        waiting, (free_pages, total_pages) = metrics.waiting, metrics.pages
        epoch = self._epoch(metrics, None)
        hand_offs, drafts, step_s = self._counts(metrics)
        now_s, fetches = time.monotonic(), list[FetchReport]()
        if self._info is not None:
            token_bytes = self._info.geometry.bytes_per_token
            fetches = self._row_loads.read(metrics, token_bytes, now_s)
        return LoadReport(
            epoch=epoch,
            queued=waiting,
            running=metrics.running,
            free_pages=free_pages,
            total_pages=total_pages,
            queue_delay_s=waiting * metrics.prefill_s,
            links=[*self._measured_links(metrics), *self._row_loads.links(now_s)],
            fetches=fetches,
            kv_bytes=self._row_loads.kv_bytes,
            speculation=None if metrics.drafts is None else drafts,
            hand_offs=None if metrics.hand_offs is None else hand_offs,
            progress=metrics.progress,
            store=metrics.store,
            step_s=step_s,
        )

    # Calls that serve a stream.

    async def prefill(self, call: Call) -> Prefilled:
        """Compute the KV of the history and return its hand-off. Some connectors give none when an
        end token ended the request; decode then computes the history itself.
        """
        info = self._info
        assert info is not None
        # An end token must not end the request: its KV is wanted, not its output.
        call.fields["ignore_eos"] = True
        try:
            answer = await super().prefill(self._plain(call))
        except DeniedError as error:
            raise await self._judged(error) from None
        if answer.transfer is None:  # An end token has ended the request, so there is no hand-off.
            return answer
        transfer = self._checked(answer, info)
        answer.good_until_s, answer.ranks = awake_since_s() + _HAND_OFF_S, transfer.tp_size
        if transfer.remote_prefill_cached_tokens is not None:
            answer.reused_tokens = transfer.remote_prefill_cached_tokens
        return answer

    def _checked(self, answer: Prefilled, info: InstanceInfo) -> Transfer:
        """Return the checked hand-off in prefill's answer. Raises UnusableError: the hand-off
        cannot be used.
        """
        assert answer.transfer is not None
        page_size_tokens = info.geometry.page_size_tokens
        told = checked(bytes(answer.transfer), len(answer.prompt_ids), page_size_tokens)
        self._process.noted(told.remote_engine_id)
        return told

    def _plain(self, call: Call) -> Call:
        """Return the call without its `kvrs` object, which vLLM does not know; kvrs's tier in vLLM
        reads an object of its own.
        """
        call.fields.pop("kvrs", None)
        if call.rows is not None and not call.rows.in_store:
            agents = call.rows.agents[:MAX_AGENTS]
            call.add_transfer(PARAMS_FIELD, seal(agents, self._params_key, time.time()))
        return call

    async def decode(self, call: Call, reader: Reader) -> None:
        info = self._info
        assert info is not None
        pull = self._begin_pull(call, info.geometry.bytes_per_token)
        if (rows := call.rows) is not None and (rows.agents or rows.in_store):
            self._row_loads.begin(rows, info.geometry.page_bytes, time.monotonic())
        try:
            await super().decode(limited(self._plain(call), info.max_model_len), reader)
        except DeniedError as error:
            raise await self._judged(error) from None
        finally:
            if pull is not None and pull.over_s is None:
                pull.over_s = time.monotonic()
            if rows is not None and rows.over_s is None:
                rows.over_s = time.monotonic()

    async def free_hand_off(self, transfer: msgspec.Raw, history: Sequence[int]) -> None:
        """Free a hand-off at prefill by asking decode for one token after the history. The request
        fetches the KV or is aborted in the queue, but not while it may fetch; either makes vLLM
        free the KV. The request has a salt of its own, so that no other request uses the fetched
        blocks, which may hold other KV by now.
        """
        info = self._info
        assert info is not None
        fields = {
            "model": info.model,
            "prompt": history,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "cache_salt": secrets.token_hex(16),
            "kv_transfer_params": transfer,
        }
        call = Call(_COMPLETIONS, fields, size_bytes=BYTES_PER_ID * len(history))
        freeing = asyncio.create_task(super().decode(call, EventReader()))
        until_s = time.monotonic() + _ABORTED_BY_S
        try:
            await asyncio.wait({freeing}, timeout=_ABORTED_AFTER_S)
            while not freeing.done() and time.monotonic() < until_s:
                with suppress(UpstreamError):  # A failed question says nothing of pulls.
                    if (await self._metrics()).pulls_nothing:
                        return
                await asyncio.wait({freeing}, timeout=_LOOK_AGAIN_S)
            if freeing.done():
                freeing.result()
        finally:
            if not freeing.cancel() and not freeing.cancelled():
                freeing.exception()

    async def ask(self, call: Call) -> bytes:
        try:
            return await super().ask(call)
        except DeniedError as error:
            raise await self._judged(error) from None

    async def _judged(self, error: DeniedError) -> KvrsError:
        """Return what a denial (HTTP 401 or 403) of a request means. A gateway may deny a request
        for its content: only if the server denies a one-token request too, the server is at fault
        and its watch ends.
        """
        if self._denied is not None:
            return error
        assert self._info is not None
        try:
            await self._probe(self._info)
        except DeniedError as denied:
            self._denied = str(denied)
            return error
        except (UpstreamError, RefusedError):
            return error
        return RefusedError(error.status, error.body)

    def blames_load(self, error: Any) -> bool:
        match error:
            case {"code": 500, "message": str(message)}:
                return message == _LOAD_FAILED
            case _:
                return False


def _check_probe(payloads: Sequence[bytes]) -> None:
    """Check that a relay can read the events of a stream, and that the events have token ids, which
    continuing a stream needs.

    Raises:
        UnusableError: the events lack ids, or are not a completion.
    """
    try:
        check_events(payloads)
    except LacksIdsError as error:
        raise UnusableError(
            f"its version does not support return_token_ids: a stream came without {error.name}"
        ) from None
    except UpstreamError as error:
        raise UnusableError(f"its stream cannot be passed on: it {error}") from None
