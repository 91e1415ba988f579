"""Where the files of a vLLM's model come from: the configuration, or the name that vLLM reports."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.core.books.prefills import PrefillScale
from kvrs.errors import ConfigError
from kvrs.proxy.backends.model_files import ModelFiles, find_model
from kvrs_testkit.vllm_cluster import LONG, PROMPT, TOKENS, Builder, Servers, Vllms

NAME = "tiny-lab/tiny-llama"
NO_MODEL: dict[str, Any] = {"cluster": {"model": None}, "profiles": {"prefill": None}}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def stored(hub: Path, model: str) -> Path:
    """The model's files under `NAME`, as `hf download` leaves them."""
    repository = hub / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(Path(model) / name, snapshot / name)
    return snapshot


def rooted(root: str) -> Callable[[Servers], None]:
    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.root = root

    return prepare


async def cut_text(system: Vllms) -> tuple[str, str]:
    """A greedy stream as text, whose decode instance dies after three tokens: its text, and what
    its head says of exactness.
    """
    system.shared.prompt_tokens, system.shared.gate_at = len(LONG), 3
    system.shared.gate = asyncio.Event()
    body = {"prompt": LONG, "max_tokens": TOKENS, "temperature": 0, "stream": True}

    async def read() -> tuple[str, str]:
        async with system.http.post(f"{system.url}/v1/completions", json=body) as response:
            assert response.status == 200
            marks = [response.headers.get(f"X-Kvrs-{name}", "") for name in ("Exact", "Inexact")]
            exact = " ".join(marks).strip()
            lines = (await response.read()).split(b"\n\n")
        chunks = [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: {")]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return text, exact

    asked = asyncio.create_task(read())
    await system.until_streams_hold(3)
    ((decode,),) = [[row["decode"] for row in (await system.state())["streams"]]]
    await system.servers[decode].kill()
    system.shared.gate.set()
    return await asked


def test_a_model_is_a_directory_or_a_name_in_the_cache(hub: Path, vllm_model: str) -> None:
    """Nothing is downloaded, and a path that is none is no name."""
    assert find_model(NAME) is None
    snapshot = stored(hub, vllm_model)

    assert find_model(vllm_model) == Path(vllm_model)
    assert find_model(NAME) == snapshot
    assert find_model("/models/of/another/machine") is None


async def test_the_configuration_may_name_a_model_of_the_cache(
    vllms: Builder, hub: Path, vllm_model: str
) -> None:
    """The command line of vLLM does so too."""
    snapshot = stored(hub, vllm_model)

    system = await vllms(cluster={"model": NAME})

    (row,) = (await system.state())["proxies"]
    assert (row["model_directory"], row["lacks_tokenizer"]) == (str(snapshot), False)


async def test_a_name_that_is_nowhere_is_refused_with_the_command_that_gets_it(
    vllms: Builder, hub: Path
) -> None:
    with pytest.raises(ConfigError, match=f"'{NAME}' is no directory .*hf download {NAME}"):
        await vllms(cluster={"model": NAME})


@pytest.mark.parametrize("is_name", [True, False])
async def test_the_model_that_vllm_serves_is_found_by_its_root(
    vllms: Builder, hub: Path, vllm_model: str, is_name: bool
) -> None:
    """A directory of this machine, or a name in the cache: its streams are continued exactly."""
    directory = stored(hub, vllm_model) if is_name else Path(vllm_model)

    system = await vllms(prepare=rooted(NAME if is_name else vllm_model), **NO_MODEL)
    whole = await system.ids(LONG)
    text, exact = await cut_text(system)

    (row,) = (await system.state())["proxies"]
    assert (row["model_directory"], row["lacks_tokenizer"]) == (str(directory), False)
    assert exact == ""
    tokenizer = await system.proxy.parts.driver.tokenizer.load()
    assert text == tokenizer.decode(whole)
    geometry = system.proxy.parts.driver.control.instances.known
    assert {each.info.geometry.layers for each in geometry.values()} == {2}


async def test_without_files_streams_survive_and_their_heads_say_inexact(
    vllms: Builder, hub: Path
) -> None:
    """The size of KV is that of a usual model, and the text after a cut is vLLM's own."""
    system = await vllms(prepare=rooted(NAME), **NO_MODEL, proxy={"inexact": "mark"})
    text, exact = await cut_text(system)

    (row,) = (await system.state())["proxies"]
    assert (row["model"], row["model_directory"]) == (NAME, None)
    assert row["lacks_tokenizer"]
    assert exact == "no tokenizer"
    assert text
    (recovery,) = (await system.state())["recoveries"]
    assert recovery["outcome"] == "resumed"
    geometry = next(iter(system.proxy.parts.driver.control.instances.known.values())).info.geometry
    assert (geometry.layers, geometry.kv_heads, geometry.page_size_tokens) == (32, 8, 16)


async def test_without_a_profile_the_table_is_a_guess_that_says_so(vllms: Builder) -> None:
    """And one of the configuration is none, but is corrected as well."""
    guessed = await vllms(profiles={"prefill": None})
    named = await vllms()

    await guessed.ids(PROMPT)

    found = (await guessed.state())["policy"]["prefill_guess"]
    assert (found["label"], found["is_guess"], found["factor"]) == ("guess", True, 1.0)
    found = (await named.state())["policy"]["prefill_guess"]
    assert (found["label"], found["is_guess"]) == ("opt-13b-a100-distserve-tp1", False)


async def test_a_prefix_that_was_cached_teaches_no_times(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL's parameters tell how much of the prompt it was."""
    seen = list[tuple[int, int]]()

    def done(_: PrefillScale, *told: Any) -> bool:
        seen.append((told[2], told[4]))
        return False

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.transfer = {"remote_prefill_cached_tokens": 3}

    monkeypatch.setattr(PrefillScale, "done", done)
    system = await vllms(prepare=prepare, profiles={"prefill": None})
    await system.ids(PROMPT)

    assert seen == [(len(PROMPT), 3)]


@pytest.mark.parametrize("text", ["[]", "{", '{"num_hidden_layers": 2}'])
def test_a_config_that_tells_no_shape_is_like_none_where_only_vllm_named_it(
    tmp_path: Path, text: str
) -> None:
    """A directory that the configuration names must be right: there it is an error."""
    (tmp_path / "config.json").write_text(text)
    reported = ModelFiles(None).of(str(tmp_path))

    assert (reported.geometry(16).layers, reported.size()) == (32, None)
    with pytest.raises(ConfigError, match=r"cluster\.model"):
        ModelFiles(str(tmp_path)).of("/models/there").geometry(16)


async def test_a_tokenizer_that_cannot_be_read_is_none_where_only_vllm_named_it(
    vllms: Builder, hub: Path, vllm_model: str
) -> None:
    """It is tried before the instance is used, so that no client is promised an exact stream."""
    (Path(vllm_model) / "tokenizer.json").write_text("{}")

    system = await vllms(prepare=rooted(vllm_model), **NO_MODEL, proxy={"inexact": "mark"})
    text, exact = await cut_text(system)

    assert (await system.state())["proxies"][0]["lacks_tokenizer"]
    assert (bool(text), exact) == (True, "no tokenizer")
