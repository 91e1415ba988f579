"""The host of a stage: a process that runs the ranks of one stage of an instance.

`python -m kvrs_engine.engine.ranks.host --config FILE --instance ID --stage N` loads the stage and
then serves the instance's processes, one after the other, at the port in `stage_hosts`
(`sessions.py`). The host outlives these processes and keeps weights and ranks. The host ends when
one of its ranks ends; its supervisor must restart it.

At SIGTERM or Ctrl-C the host ends when the served process has ended, at a second signal at once.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvrs.config.cluster import EngineSettings, stage_host_id
from kvrs.config.file import Config, load_config, read_secrets
from kvrs.errors import (
    ConfigError,
    KvrsError,
    MissingExtraError,
    RanksLostError,
    TransferError,
)
from kvrs.ids import InstanceId
from kvrs.net.http import naming_port
from kvrs.process.logs import log_to_stderr
from kvrs.process.memory import collect_nothing_yet, keep_what_is_there
from kvrs.protocol.pages import TrafficClass
from kvrs.protocol.secrets import Scope
from kvrs.transfer.connections import admit
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.server import HANDSHAKE_TIMEOUT_S, AcceptLoop, listening
from kvrs.transfer.stream import SocketStream
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.connection import StageAt
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.link import (
    Begin,
    StageChannel,
    StageLink,
    StageLost,
    StageRefused,
    ToStage,
    facts_digest,
)
from kvrs_engine.engine.ranks.orders import StageOrders
from kvrs_engine.engine.ranks.replicate import PartsReceiver, PartsSender
from kvrs_engine.engine.ranks.sessions import StageRefusedError, StageSessions, check_version
from kvrs_engine.engine.ranks.settings import layout_of
from kvrs_engine.engine.worker import geometry_of
from kvrs_engine.scheduling.pace import Pace

log = logging.getLogger(__name__)

_EPOCH = 1  # The epoch of every host, which is not used.


def find_stage(config: Config, host: InstanceId) -> tuple[InstanceId, int]:
    """Return the instance and the stage of a host."""
    return next(
        (instance.id, stage)
        for _, instance in config.cluster.instances()
        for stage in instance.remote_stages
        if instance.stage_host_id(stage) == host
    )


class StageHost:
    def __init__(
        self,
        config: Config,
        instance_id: InstanceId,
        stage: int,
        secret: bytes,
        older: Sequence[bytes] = (),
    ) -> None:
        """Load the stage, in the calling thread.

        Raises:
            ConfigError: there is no such stage, or directory or settings are wrong.
            KvrsError: there is not enough memory, a rank has ended, or the ranks differ.
        """
        _, instance = config.cluster.find(instance_id)
        if (place := instance.remote_stages.get(stage)) is None:
            allowed = ", ".join(map(str, instance.remote_stages)) or "none"
            raise ConfigError(
                f"instance {instance_id!r}: no stage_hosts for stage {stage}; allowed: {allowed}"
            )
        if config.cluster.model is None:
            raise ConfigError("cluster.model: missing; allowed: a Hugging Face directory")
        directory, settings = Path(config.cluster.model), config.cluster.engine
        self._model = model = ModelConfig.from_directory(directory)
        layout = layout_of(instance, model.units, config.elastic)
        assert layout is not None, "an instance with stage_hosts has several ranks"
        self._place, self._instance = place, instance
        self._ring = secret, *older
        self._stall_timeout_s = config.transfer.stall_timeout_s
        self._identity = Identity(
            instance.stage_host_id(stage),
            place.node,
            _EPOCH,
            facts_digest(model, settings, layout),
            geometry_of(model, settings).page_bytes,
        )
        self._accepting = AcceptLoop(self._serve_one, self._failed)
        others = [each for _, each in config.cluster.donors(instance_id)]
        self._sessions = StageSessions(instance_id, settings.pages, [each.id for each in others])
        self._is_stopping = False
        began_s = time.monotonic()
        self.group = RankGroup(
            directory,
            settings,
            layout,
            config.elastic,
            range(stage, stage + 1),
            yields=True,  # Other instances on the node may compute meanwhile.
        )
        ranks, units = layout.stages[stage].ranks, model.units_of_ranks
        own_bytes = sum(units.bytes_of(unit) for rank in ranks for unit in layout.held(rank))
        paced_s = _load_s(settings) * own_bytes / units.total_bytes
        time.sleep(max(0.0, began_s + paced_s - time.monotonic()))
        self._load_s = time.monotonic() - began_s
        hosts = {each.id: each.remote_stages[stage] for each in others}
        peers = {
            name: Peer(stage_host_id(name, stage), at.node, at.host, at.port)
            for name, at in hosts.items()
        }
        own = partial(StageAt, own=self._identity, secret=secret, transfer=config.transfer)
        self._links = SendingLinks(config.transfer, SendingFaults(), place.node)
        self._sender = PartsSender(
            self.group, {name: own(peer) for name, peer in peers.items()}, self._links
        )
        senders = frozenset(peer.instance for peer in peers.values())
        self._receiver = PartsReceiver(self.group, self._sessions, senders, self._stall_timeout_s)

    async def serve(
        self,
        ready: Callable[[], object],
        stop: asyncio.Event,
        at_once: asyncio.Event | None = None,
    ) -> None:
        """Serve until `stop` and the end of the open session, or until `at_once`, or until a rank
        ends. `ready` is called when the port accepts connections.

        Raises:
            ConfigError: the port is in use.
            KvrsError: a rank has ended.
        """
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[KvrsError] = loop.create_future()
        self._orders = StageOrders(self.group, self._sessions, self._model, self._load_s)
        self.group.on_change = lambda: loop.call_soon_threadsafe(self._orders.changed)
        self.group.on_end = lambda lost: loop.call_soon_threadsafe(self._finish, lost)
        host, port = self._place.host, self._place.port
        stopping = asyncio.create_task(self._stopped(stop))
        at_once_too = asyncio.create_task((at_once or asyncio.Event()).wait())
        try:
            with naming_port(f"instance {self._instance.id}", "stage_hosts", host, port):
                self._accepting.listen(listening(host, port))
            ready()
            ends: list[asyncio.Future[Any]] = [stopping, at_once_too, self._end]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                await self._tell(self._end.result())
                raise self._end.result()
        finally:
            stopping.cancel()
            at_once_too.cancel()
            self.group.end()
            await self._accepting.close()
            self._sender.close()
            self.group.close()
            self._orders.close()

    async def _stopped(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._is_stopping = True
        await self._sessions.over()

    def _finish(self, error: KvrsError) -> None:
        if not self._end.done():
            self._end.set_result(error)

    async def _tell(self, error: KvrsError) -> None:
        if isinstance(error, RanksLostError):
            await self._sessions.tell_all(StageLost(list(error.ranks), error.reason))

    def _failed(self, bug: BaseException) -> None:
        self._finish(KvrsError(f"a connection ended in a bug: {bug!r}"))

    async def _serve_one(self, sock: socket.socket) -> None:
        if self._is_stopping:
            return  # Clients then wait for the next host.
        stream = SocketStream(sock, self._stall_timeout_s)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                _, client = await admit(
                    stream, self._ring, lambda: self._identity, scope=Scope.STAGES
                )
                link = StageLink(stream, ToStage, self._orders.max_payload_bytes)
                begin, _ = await link.receive()
        except (TransferError, TimeoutError, OSError) as error:
            log.warning("connection of a stage refused", extra={"cause": str(error)})
            return
        self._accepting.proven()
        try:
            await self._serve_link(link, client, begin)
        except RanksLostError as lost:
            self._finish(lost)
        except (TransferError, OSError) as error:
            level = logging.WARNING if isinstance(error, StageRefusedError) else logging.INFO
            log.log(level, "connection of a stage ends", extra={"cause": str(error)})
            with suppress(TransferError, OSError):
                await link.send(StageRefused(str(error)))

    async def _serve_link(self, link: StageLink, client: Identity, begin: object) -> None:
        if isinstance(begin, Begin) and begin.channel is StageChannel.PARTS:
            check_version(begin)
            await self._receiver.serve(link, client)
            return
        async with self._sessions.of(link, client, begin) as session:
            assert isinstance(begin, Begin), "else it is refused"
            match begin.channel:
                case StageChannel.BATCHES:
                    await self._orders.batches(link, session)
                case StageChannel.PAGES:
                    link.limit(self._links.to(client.node), TrafficClass.HANDOFF)
                    await self._orders.pages(link, session)
                case _:
                    await self._sender.serve(link, session)


def _load_s(settings: EngineSettings) -> float:
    """Return the least time to load a whole model by the profile; with a rate of the disk, ranks
    read as long.
    """
    if settings.pace is None or settings.disk_bytes_per_s is not None:
        return 0.0
    return Pace(settings.pace).load_s


async def _serve(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, os.environ)
    log_to_stderr(**config.logs.options)
    stop, at_once = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (at_once if stop.is_set() else stop).set()
        )
    secret, *older = read_secrets(config.security, os.environ)
    host = StageHost(config, arguments.instance, arguments.stage, secret, older)
    keep_what_is_there()
    await host.serve(lambda: print("ready", flush=True), stop, at_once)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvrs_engine.engine.ranks.host", description="Run one stage of an instance."
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file with all ports given")
    parser.add_argument(
        "--instance", type=InstanceId, required=True, help="id of the instance in cluster.nodes"
    )
    parser.add_argument("--stage", type=int, required=True, help="number of the stage, from 0")
    collect_nothing_yet()
    try:
        asyncio.run(_serve(parser.parse_args()))
    except (ConfigError, MissingExtraError) as error:
        print(error, file=sys.stderr)
        return 2
    except KvrsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
