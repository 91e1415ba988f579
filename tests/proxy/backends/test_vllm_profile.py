"""`kvrs profile --url`: prefills of a running vLLM, measured from outside."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.errors import ConfigError
from kvrs.profiles.catalog import parse_profile, prefill_table
from kvrs.proxy.backends.vllm_profile import (
    LONGEST_TOKENS,
    VllmProfileOptions,
    lengths_up_to,
    run_vllm_profile,
)
from kvrs_testkit.vllm_cluster import Builder, Servers

pytestmark = pytest.mark.network


class Clock:
    """Each reading is later by the next of these times, then by 1 s."""

    def __init__(self, *steps_s: float) -> None:
        self._now_s, self._steps_s = 0.0, [*steps_s]

    def __call__(self) -> float:
        self._now_s += self._steps_s.pop(0) if self._steps_s else 1.0
        return self._now_s


async def measured(
    url: str, out: Path, *, clock: Any = None, **options: Any
) -> list[tuple[int, int]]:
    """The file is written; returned is what was told of the progress."""
    told: list[tuple[int, int]] = []
    asked = VllmProfileOptions(url=url, out=out, **options)

    def run() -> None:
        run_vllm_profile(
            asked, {}, lambda done, total: told.append((done, total)), clock or Clock()
        )

    await asyncio.to_thread(run)
    return told


def url_of(servers: Servers, name: str = "p0") -> str:
    return f"http://127.0.0.1:{servers[name].port}"


def test_lengths_double_up_to_what_the_model_takes() -> None:
    """One token is output; a model that takes few begins with shorter ones."""
    assert lengths_up_to(None, None)[-1] == LONGEST_TOKENS
    assert lengths_up_to(1000, 4096) == [128, 256, 512]
    assert lengths_up_to(None, 513) == [128, 256, 512]
    assert lengths_up_to(None, 65) == [16, 32, 64]
    for longest, model in ((10, 4096), (None, 20)):
        with pytest.raises(ConfigError, match=r"--longest-tokens: got .*allowed: at least 32"):
            lengths_up_to(longest, model)


async def test_the_file_is_a_profile_that_the_configuration_takes(
    vllms: Builder, vllm_model: str, tmp_path: Path
) -> None:
    """The median of three counts; every prompt has its length and a salt of its own."""
    system = await vllms()
    server = system.servers["p0"]
    server.root, server.in_one_piece = vllm_model, True
    out = tmp_path / "mine.json"
    steps_s = [each for took_s in (9.0, 0.5, 0.4, 1.0, 1.1, 1.2) for each in (1.0, took_s)]

    told = await measured(url_of(system.servers), out, longest_tokens=256, clock=Clock(*steps_s))

    found = parse_profile(out.read_bytes(), str(out))
    assert prefill_table(str(out)).seconds_for(128) == pytest.approx(0.5)
    assert prefill_table(str(out)).seconds_for(256) == pytest.approx(1.1)
    assert (found.kind, found.engine, found.version) == ("measured", "vLLM", "0.32.0")
    assert (found.geometry.layers, found.model) == (2, vllm_model)
    asked = [body for body in server.bodies if "cache_salt" in body]
    assert [len(body["prompt"]) for body in asked] == [128, *[128] * 3, *[256] * 3]
    assert len({body["cache_salt"] for body in asked}) == len(asked)
    assert {body["max_tokens"] for body in asked} == {1}
    assert told == [(done, 7) for done in range(1, 8)]


async def test_without_files_of_the_model_the_size_of_its_kv_is_said_to_be_assumed(
    vllms: Builder, tmp_path: Path
) -> None:
    system = await vllms()
    system.servers["p0"].in_one_piece = True
    out = tmp_path / "mine.json"

    await measured(url_of(system.servers), out, longest_tokens=256, repeats=1)

    found = parse_profile(out.read_bytes(), str(out))
    assert (found.geometry_source or "").startswith("assumed: that of Llama-3.1-8B")


async def test_a_busy_server_is_left_alone(vllms: Builder, tmp_path: Path) -> None:
    """No prompt is sent, and no file is written."""
    system = await vllms()
    system.servers["p0"].running, system.servers["p0"].waiting = 2, 1
    system.servers["p0"].bodies.clear()

    with pytest.raises(ConfigError, match="2 requests run there and 1 wait; allowed: none"):
        await measured(url_of(system.servers), tmp_path / "mine.json")

    assert not system.servers["p0"].bodies
    assert not (tmp_path / "mine.json").exists()


async def test_a_server_that_answers_wrongly_is_named(vllms: Builder, tmp_path: Path) -> None:
    system = await vllms()
    system.servers["p0"].denies = 401

    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:\d+/v1/completions: HTTP 401"):
        await measured(url_of(system.servers), tmp_path / "mine.json")
    await system.servers["p0"].kill()
    with pytest.raises(ConfigError, match="allowed: a vLLM that runs"):
        await measured(url_of(system.servers), tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--url", "x", "--out", "OUT/a.json"), "--url: got 'x'; allowed: http://HOST:PORT"),
        (("--url", "http://127.0.0.1:1", "--out", "OUT/a.yaml"), "--out: got "),
        (
            ("--url", "http://127.0.0.1:1", "--out", "OUT/a.json", "--max-batch", "7"),
            "--max-batch: given beside --url; allowed: for the embedded engine",
        ),
        (
            ("--url", "http://127.0.0.1:1", "--out", "OUT/a.json", "--model", "OUT/none"),
            "--model: 'OUT/none' is no directory with a config.json",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_is_asked(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)

    ended = CliRunner().invoke(app, ["profile", *(each.replace("OUT", folder) for each in options)])

    assert said.replace("OUT", folder) in str(ended.exception)
