"""An instance of which stages are on two nodes: hosts of stages as processes, on loopback."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvrs.config.file import ENV_NAME, Config, dump_config, parse_config
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.secrets import Scope
from kvrs.transfer.connections import introduce
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.stream import SocketStream, page_socket
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.link import Begin, FromStage, StageLink, facts_digest
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.settings import layout_of
from kvrs_engine.engine.worker import geometry_of
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.forked import ForkedProcess
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.processes import says_ready

SECRET = b"a secret of the tests, long enough"
D0 = InstanceId("d0")
TOKENS = [(7 * at * at + 3) % 500 for at in range(120)]
CUTS = [0, 50, 51, 67, 119, 120]


def chunks() -> list[Chunk]:
    return [
        Chunk(TOKENS[first:last], first, range(20, 30), logits=min(3, last - first))
        for first, last in pairwise(CUTS)
    ]


def config_of(model: Path, port: int = 0, hosts: int = 1, tp: int = 1, **engine: Any) -> Config:
    """d0 with two stages on n0 and n1, where p0 is, of which the last `hosts` are in hosts; the
    last one at `port`, if that is given.
    """
    ports = free_ports(hosts)
    ports[-1] = port or ports[-1]
    places = zip(["n0", "n1"][2 - hosts :], ports, strict=True)
    in_hosts = [{"node": node, "port": own} for node, own in places]
    divided = {"id": "d0", "role": "decode", "pp": 2, "tp": tp, "stage_hosts": in_hosts}
    nodes = [
        {"id": "n0", "instances": [divided]},
        {"id": "n1", "instances": [{"id": "p0", "role": "prefill"}]},
    ]
    settings = {"pages": 64, **engine}
    return parse_config({"cluster": {"model": str(model), "engine": settings, "nodes": nodes}})


def model_of(config: Config) -> Path:
    assert config.cluster.model is not None
    return Path(config.cluster.model)


def layout_in(config: Config) -> Layout:
    _, settings = config.cluster.find(D0)
    layout = layout_of(settings, ModelConfig.from_directory(model_of(config)).units)
    assert layout is not None
    return layout


@contextmanager
def closing(head: RanksOnNodes) -> Iterator[RanksOnNodes]:
    try:
        yield head
    finally:
        head.close()


@contextmanager
def hosting(
    config: Config, directory: Path, stage: int = 1, of: InstanceId = D0
) -> Iterator[ForkedProcess]:
    """The host of a stage of an instance, which listens."""
    path = directory / "stage.yaml"
    path.write_text(dump_config(config))
    with tempfile.NamedTemporaryFile(dir=directory) as output:
        host = ForkedProcess(
            "kvrs_engine.engine.ranks.host",
            *("--config", str(path), "--instance", of, "--stage", str(stage)),
            environment=os.environ | {ENV_NAME: SECRET.decode(), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=sys.__stderr__ or sys.stderr,
        )
        try:
            while not says_ready(Path(output.name)):
                assert host.poll() is None
                time.sleep(0.01)
            yield host
        finally:
            host.kill()
            host.wait()


def head_of(
    config: Config, secret: bytes = SECRET, epoch: int = 1, of: InstanceId = D0
) -> RanksOnNodes:
    node, settings = config.cluster.find(of)
    return RanksOnNodes(config, node.id, settings, layout_in(config), secret, epoch)


PATIENCE_S = 60.0


async def opened(
    config: Config, epoch: int, begin: Begin, instance: InstanceId = D0, of: InstanceId = D0
) -> tuple[StageLink, Any]:
    """A link of an instance to the second stage of another one, or of its own, and the answer to
    its beginning.
    """
    model, settings = ModelConfig.from_directory(model_of(config)), config.cluster.engine
    facts = facts_digest(model, settings, layout_in(config))
    page_bytes = geometry_of(model, settings).page_bytes
    own = Identity(instance, NodeId("n0"), epoch, facts, page_bytes)
    at = config.cluster.find(of)[1].stage_hosts[-1]
    sock = page_socket(at.host)
    stream = SocketStream(sock, PATIENCE_S)
    peer = Peer(InstanceId(f"{of}-stage-1"), at.node, at.host, at.port)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (at.host, at.port))
        await introduce(stream, SECRET, own, peer, Scope.STAGES)
        link = StageLink(stream, FromStage, 1 << 24)
        await link.send(begin)
        answer, _ = await link.receive(PATIENCE_S)
    except BaseException:
        stream.close()
        raise
    return link, answer
