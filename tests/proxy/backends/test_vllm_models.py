"""Which model a proxy believes in: that of accepted servers, whatever others say."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.file import parse_config
from kvrs.core.configured import Configured
from kvrs.core.fleet.known import Instances
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId
from kvrs.protocol.instance import InstanceInfo, assumed_instance
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs_testkit.scripted import Fault
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import CONFIG, LONG, TOKENS, Builder, Servers, Vllms, document

NO_MODEL: dict[str, Any] = {"cluster": {"model": None}, "profiles": {"prefill": None}}


@pytest.fixture
def other_model(vllm_model: str, tmp_path: Path) -> str:
    """Files of another model, of another size, whose tokenizer makes other text of each id."""
    directory = tmp_path / "other"
    directory.mkdir()
    tokenizer = json.loads((Path(vllm_model) / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    turned = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    tokenizer["model"]["vocab"] = turned
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    return str(directory)


async def serving(vllms: Builder, root: str) -> Vllms:
    """A cluster whose servers, and not the configuration, name their model."""
    return await vllms(prepare=lambda servers: rooted(servers, root), **NO_MODEL)


async def refusing(vllms: Builder, root: str, other: str) -> Vllms:
    """Such a cluster, in which d1 has come back with another model."""
    system = await serving(vllms, root)
    await replace(system, "d1", other)
    await system.until_health(d1="refused")
    return system


def rooted(servers: Servers, root: str) -> None:
    for server in servers.values():
        server.root = root


async def replace(system: Vllms, name: str, root: str) -> None:
    """End a server, and start one of this model at its port."""
    server = system.servers[name]
    await server.kill()
    server.root = root
    await server.start()


@pytest.mark.parametrize("has_files", [True, False])
async def test_a_refused_server_changes_nothing_of_the_model(
    vllms: Builder, vllm_model: str, other_model: str, *, has_files: bool
) -> None:
    """Neither the text behind a cut nor the head of a response, nor what operators are shown."""
    if not has_files:
        shutil.rmtree(other_model)
    system = await refusing(vllms, vllm_model, other_model)
    system.shared.prompt_tokens = len(LONG)

    whole = await system.ids(LONG)
    system.shared.faults[3] = Fault.RESET
    body = {"prompt": LONG, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    async with system.http.post(system.url + "/v1/completions", json=body) as response:
        mark = response.headers.get("X-Kvrs-Exact")
        events = events_of(await response.read())
    chunks = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    (row,) = (await system.state())["proxies"]
    assert (row["model"], row["model_directory"]) == (vllm_model, vllm_model)
    assert len((await system.state())["recoveries"]) == 1
    assert mark is None
    assert text == (await system.proxy.parts.driver.tokenizer.load()).decode(whole)


async def test_another_model_never_takes_the_place_of_one_that_is_down(
    vllms: Builder, vllm_model: str, other_model: str
) -> None:
    """A wrong server that returns while all right ones are down stays refused, and they return."""
    system = await serving(vllms, vllm_model)
    for name in ("p0", "d0"):
        await system.servers[name].kill()
    await replace(system, "d1", other_model)
    await system.until_health(p0="down", d0="down", d1="refused")
    reason = (await system.state())["instances"][2]["reason"]

    for name in ("p0", "d0"):
        await system.servers[name].start()
    await system.until_health(p0="up", d0="up", d1="refused")

    assert (await system.state())["proxies"][0]["model"] == vllm_model
    assert other_model in reason
    assert vllm_model in reason


async def test_a_refused_server_that_was_repaired_is_used(
    vllms: Builder, vllm_model: str, other_model: str
) -> None:
    """Its new process shows at the next look."""
    system = await refusing(vllms, vllm_model, other_model)

    await replace(system, "d1", vllm_model)
    info = await system.proxy.parts.driver.backends[InstanceId("d1")].info()

    assert info.root == vllm_model
    await system.until_health(d1="up")


async def test_a_configured_model_refuses_servers_of_another_shape(
    vllms: Builder, other_model: str
) -> None:
    """Where the files of both are here. A path of another machine says nothing."""
    system = await vllms()
    await replace(system, "d0", "/models/tiny")
    await replace(system, "d1", other_model)

    await system.until_health(d0="up", d1="refused")
    assert "cluster.model says" in (await system.state())["instances"][2]["reason"]


async def test_another_version_of_the_engine_is_used_beside_the_old_one(vllms: Builder) -> None:
    def prepare(servers: Servers) -> None:
        servers["d1"].version = "0.33.0"

    system = await vllms(prepare=prepare)

    rows = (await system.state())["instances"]
    assert [row["engine_version"] for row in rows] == ["0.32.0", "0.32.0", "0.33.0"]


ROOTS = ("/models/right", "/models/wrong", "/models/none")
REPORTS = st.lists(
    st.tuples(st.sampled_from(("p0", "d0", "d1")), st.sampled_from((*ROOTS, None))), max_size=30
)


@given(reports=REPORTS)
def test_whatever_the_order_of_reports_all_that_is_believed_is_of_one_model(
    reports: list[tuple[str, str | None]],
) -> None:
    """The first accepted one's; and no report of another one is accepted. None: it goes down."""
    instances = Instances(Configured.of(parse_config(document("/m", {"p0": 1, "d0": 2, "d1": 3}))))
    files, first = ModelFiles(None), ""
    for name, root in reports:
        known = instances.known[InstanceId(name)]
        if root is None:
            if known.health is Health.UP:
                known.lose("killed")
            continue
        info = reported(known, files, root)
        fault = instances.fault(known, info, streams_open=False)
        assert (fault is None) == (not first or root == first)
        if fault is None:
            instances.accept(known, info)
            files.accept(root)
            first = first or root
        assert files.name == first
        assert instances.model == first
        assert instances.max_model_len == ROOTS.index(first) + 100


def reported(known: Member, files: ModelFiles, root: str) -> InstanceInfo:
    """The report of a server of this model, which has all of its fields from it."""
    info = assumed_instance(known.id, known.node, known.role, files.of(root).geometry(16))
    return msgspec.structs.replace(
        info, root=root, fingerprint=root, model=root, max_model_len=ROOTS.index(root) + 100
    )


async def accept(system: Vllms, name: str) -> tuple[int, str]:
    async with system.http.post(f"{system.admin_url}/kvrs/v1/accept/{name}") as answer:
        return answer.status, await answer.text()


async def test_a_new_model_is_accepted_by_one_order(
    vllms: Builder, vllm_model: str, tmp_path: Path
) -> None:
    """With the same tokenizer and shape. Its servers come up, those of before stay until they end,
    and are refused from then on.
    """
    new = tmp_path / "new"
    new.mkdir()
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(Path(vllm_model) / name, new)
    system = await vllms(
        prepare=lambda servers: rooted(servers, vllm_model),
        **NO_MODEL | {"proxy": {"self_test": True}},
    )
    await replace(system, "d1", str(new))
    await system.until_health(d1="refused")

    status, _ = await accept(system, "d1")
    await system.until_health(p0="up", d0="up", d1="up")

    async def is_right() -> bool:
        rows = (await system.state())["instances"]
        return [row["self_test"]["weights"] for row in rows[1:]] == ["other", "right"]

    await system.until(is_right)
    await replace(system, "d0", vllm_model)
    await system.until_health(d0="refused")

    assert status == 200
    assert (await system.state())["proxies"][0]["model_directory"] == str(new)


async def test_a_model_of_another_shape_or_tokenizer_needs_a_proxy_of_its_own(
    vllms: Builder, vllm_model: str, other_model: str
) -> None:
    system = await refusing(vllms, vllm_model, other_model)

    by_tokenizer = await accept(system, "d1")
    shutil.copy(Path(vllm_model) / "tokenizer.json", other_model)
    by_shape = await accept(system, "d1")

    assert (by_tokenizer[0], by_shape[0]) == (409, 409)
    assert "another tokenizer.json" in by_tokenizer[1]
    assert "KV of another shape" in by_shape[1]
