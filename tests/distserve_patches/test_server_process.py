"""The real server: DistServe's own engine in a process of its own, two decode workers, killed on
purpose.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from tests.distserve_patches.server_process import ServerProcess, config_for

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.distserve, pytest.mark.nightly]

PROMPT = [(7 * i) % 500 + 4 for i in range(43)]  # Two full pages and a part.
TOKENS = 40
TWO_DECODE_WORKERS = ("--decoding-tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def server(
    logical_gpus: int, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    one = ServerProcess(
        config_for(tiny_model), tmp_path_factory.mktemp("server"), *TWO_DECODE_WORKERS
    )
    try:
        one.wait_ready()
        yield one
    finally:
        one.process.kill()
        one.process.wait()


@pytest.fixture(scope="module")
def embedded(tiny_model: Path) -> list[int]:
    """The output of the embedded engine, token by token."""
    worker = Worker(tiny_model, parse_config({"cluster": {"engine": {"pages": 64}}}).cluster.engine)
    ids, pages = list(PROMPT), range(16)
    chunk = Chunk(token_ids=ids, first_position=0, pages=pages, logits=1)
    for _ in range(TOKENS):
        ids = [*ids, int(worker.execute([chunk])[0].argmax())]
        chunk = Chunk(token_ids=ids[-1:], first_position=len(ids) - 1, pages=pages, logits=1)
    return ids[len(PROMPT) :]


def ids_of(answer: Any) -> list[int]:
    ids = answer["choices"][0]["token_ids"]
    assert isinstance(ids, list)
    return ids


def kvrs(stream: str, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {"stream": stream, "attempt": attempt, "prompt_tokens": len(PROMPT)} | more


def test_its_tokens_are_the_embedded_engines(server: ServerProcess, embedded: list[int]) -> None:
    """One call through both stages, and the two calls of the P/D convention: the same tokens as one
    exact engine.
    """
    assert ids_of(server.complete("d0", PROMPT, TOKENS)) == embedded

    params = server.complete(
        "p0", PROMPT, 1, kv_transfer_params={"do_remote_decode": True}, kvrs=kvrs("two")
    )
    again = server.complete(
        "d0", PROMPT, TOKENS, kv_transfer_params=params["kv_transfer_params"], kvrs=kvrs("two")
    )

    assert ids_of(again) == embedded


def test_the_death_of_one_decode_worker_is_the_decode_instances_only(
    server: ServerProcess, embedded: list[int]
) -> None:
    """Its stream gets an error, the prefill instance and the process live on with the prompt's
    pages, from which the stream goes on exactly when the stage is back, in a higher epoch.
    """
    d0, p0 = server.get("d0", "/kvrs/v1/instance"), server.get("p0", "/kvrs/v1/instance")
    assert len(d0["worker_pids"]) == 2
    events = server.stream("d0", PROMPT, 2000, kvrs=kvrs("cut"))
    got = [token for _ in range(10) for token in ids_of(next(events))]

    os.kill(d0["worker_pids"][1], signal.SIGKILL)

    *_, last = events
    assert last["error"]["code"] == "engine_failed"
    assert got == embedded[:10]
    assert server.get("p0", "/kvrs/v1/instance") == p0
    back = server.wait_for("d0", d0["epoch"])
    assert back["pid"] == d0["pid"]
    assert not set(back["worker_pids"]) & set(d0["worker_pids"])
    sources = [{"id": "p0", "first_page": 0, "pages": 2, "generation": p0["epoch"]}]
    rest = server.complete("d0", PROMPT + got, TOKENS, kvrs=kvrs("cut", 2, sources=sources))
    assert got + ids_of(rest) == embedded
    assert rest["usage"]["completion_tokens"] == TOKENS


def test_the_death_of_the_prefill_worker_leaves_streams_alone(
    server: ServerProcess, embedded: list[int]
) -> None:
    """A stream that decodes already does not need the context stage any more."""
    p0 = server.get("p0", "/kvrs/v1/instance")
    events = server.stream("d0", PROMPT, TOKENS)
    got = ids_of(next(events)) + ids_of(next(events))

    os.kill(p0["worker_pids"][0], signal.SIGKILL)

    got += [token for event in events for token in ids_of(event)]
    assert got == embedded
    server.wait_for("p0", p0["epoch"])
    assert ids_of(server.complete("d0", PROMPT, TOKENS)) == embedded


def test_a_client_that_leaves_frees_everything(server: ServerProcess) -> None:
    """Upstream has no abort: its request would run on to the last token."""
    before = server.get("d0", "/kvrs/v1/load")
    events = server.stream("d0", PROMPT, 4000, stream_options={"include_usage": True})
    next(events)

    events.close()  # type: ignore[attr-defined]

    give_up_s = time.monotonic() + 30
    while (load := server.get("d0", "/kvrs/v1/load"))["running"] or load["free_pages"] < before[
        "free_pages"
    ]:
        assert time.monotonic() < give_up_s, load
        time.sleep(0.02)


def test_it_ends_by_signal_with_its_workers(server: ServerProcess) -> None:
    """The last test of the module."""
    workers = [
        pid for name in ("p0", "d0") for pid in server.get(name, "/kvrs/v1/instance")["worker_pids"]
    ]

    assert server.stop() == 0

    give_up_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    assert "Traceback" not in server.log.read_text()
