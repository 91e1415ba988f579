"""One stream of real vLLM, whose server is killed in the middle: what a client and an operator see,
kept with the time of each word (`make demo-vllm`), and drawn as a film (`picture.py`).
"""

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.net.admin import AdminClient, AdminError
from kvrs_testkit.vllm_rows import RowServers
from kvrs_testkit.vllm_servers import PYTHON_ENV, START_TIMEOUT_S, VllmServers

TOKENS = 167  # Of the reciter's page.
KILL_AT = 120
SEED = 7
PROMPT = "ka lo mi ren sta vor ti el"
# Packages that make the model; vLLM has an environment of its own.
_NEEDED = ("tokenizers", "torch", "transformers")
_WIDTH = 92
_LOOK_AGAIN_S = 0.2
_WITHIN_S = START_TIMEOUT_S + 120.0
_COUNTED_S = 10.0


class Streamed(NamedTuple):
    """A stream to its end: the text of each event with its time since the request, and how often
    the stream finished.
    """

    events: list[tuple[float, str]]
    tokens: int
    finishes: int
    is_whole: bool  # It ended with [DONE], without an error event.

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.events)


class Session:
    """The part of the terminal that is kept."""

    def __init__(self) -> None:
        self.console = Console(record=True, width=_WIDTH, highlight=False)

    def step(self, text: str) -> None:
        self.console.print(Text.assemble(("▸ ", "bold green"), (text, "bold")))

    def line(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))


def main() -> int:
    if absent := [name for name in _NEEDED if find_spec(name) is None]:
        print(f"not installed: {', '.join(absent)}; to install: make install", file=sys.stderr)
        return 2
    from experiments.demo_vllm.picture import film_of
    from experiments.demo_vllm.reciter import REQUEST, write_reciter

    options = options_of(__doc__)
    record = Record(SEED, timed=False)
    session = Session()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "reciter"
        write_reciter(model, SEED)
        with RowServers(Path(directory), model=model, python=options.python) as servers:
            print("starting two servers of vLLM and an agent (a minute or two) ...", flush=True)
            servers.start_all()
            figures = {"prompt": REQUEST} | show(servers, session, REQUEST)
    text = session.console.export_text(clear=False)
    is_void = record.keep(options.out, "demo_vllm", figures, text)
    if options.out is not None:
        path = options.out / "demo_vllm.svg"
        path.write_text(film_of(figures))
        print(f"\nthe stream as a film: {path}")
    is_shown = figures["is_exact"] and figures["loaded_tokens"]
    return 1 if is_void or not is_shown else 0


def show(servers: VllmServers, session: Session, prompt: str) -> dict[str, Any]:
    """Run the stream undisturbed and with the kill; return the figures."""
    config = servers.config
    servers.start_proxy(config)
    url = f"http://{config.proxy.host}:{config.proxy.port}"
    admin = AdminClient(f"http://{config.proxy.admin_host}:{config.proxy.admin_port}")
    until_tested(admin, len(servers.names))
    clean = stream(url, servers.model, "undisturbed", prompt=prompt)

    session.step(f"vLLM on CPUs, {' and '.join(servers.names)}, kvrs in their CPU tier")
    session.line("  the agent of their node, kvrs proxy in front; all self-tests have passed")
    session.step(f"POST /v1/completions, stream, {TOKENS} tokens, greedy")
    killed: list[tuple[str, float]] = []

    def strike() -> None:
        (row,) = admin.state()["streams"]
        servers.kill(row["decode"])
        killed.append((row["decode"], time.monotonic()))

    begun_s = time.monotonic()
    found = stream(url, servers.model, "killed", prompt=prompt, at=KILL_AT, strike=strike)
    recovery = counted_recovery(admin)
    ((victim, killed_s),) = killed
    before, behind = _around(found.events)
    session.line(f"  {before} ...", "dim")
    session.step(f"SIGKILL of all processes of {victim}, after {KILL_AT} tokens")
    session.line(f"  ... {behind}", "dim")
    session.line(f"  {found.tokens} tokens, {found.finishes} finish, [DONE]", "dim")
    is_exact = found.is_whole and found.finishes == 1 and found.text == clean.text
    figures = {
        "is_exact": is_exact,
        "tokens": found.tokens,
        "killed_at_token": KILL_AT,
        "victim": victim,
        "went_to": recovery["to"],
        "option": recovery["option"],
        "loaded_tokens": recovery["loaded_tokens"],
        "computed_tokens": recovery["computed_tokens"],
        "killed_at_s": round(killed_s - begun_s, 4),
        "events": [(round(at_s, 4), text) for at_s, text in found.events],
    }
    session.step("GET /kvrs/v1/state, the last of `recoveries`")
    shown = ("option", "from", "to", "loaded_tokens", "computed_tokens")
    session.line("  " + ", ".join(f"{key} {recovery[key]}" for key in shown))
    session.step("the same request without a kill")
    session.line("  the same text" if is_exact else "  ANOTHER TEXT", "bold" if is_exact else "red")
    return figures


def counted_recovery(admin: AdminClient) -> dict[str, Any]:
    """The last recovery, once it is known how much was loaded for it."""
    until_s = time.monotonic() + _COUNTED_S
    while True:
        recovery: dict[str, Any] = admin.state()["recoveries"][-1]
        if recovery["loaded_tokens"] is not None or time.monotonic() > until_s:
            return recovery
        time.sleep(_LOOK_AGAIN_S)


def until_tested(admin: AdminClient, instances: int) -> None:
    """Wait until all are up and have passed their self-tests.

    Raises:
        TimeoutError: they have not within minutes.
    """
    until_s = time.monotonic() + _WITHIN_S
    while time.monotonic() < until_s:
        with suppress(AdminError):  # The proxy has no ports yet.
            rows = admin.state()["instances"]
            up = [row["self_test"] or {} for row in rows if row["health"] == "up"]
            if sum(bool(test.get("done")) for test in up) == instances:
                return
        time.sleep(_LOOK_AGAIN_S)
    raise TimeoutError(f"of {instances} servers not all are up and tested")


def stream(
    url: str,
    model: str,
    salt: str,
    *,
    tokens: int = TOKENS,
    prompt: str = PROMPT,
    at: int = 0,
    strike: Callable[[], None] | None = None,
) -> Streamed:
    """Read a greedy stream; after `at` tokens call `strike` once. `salt` keeps caches apart."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    request = urllib.request.Request(  # noqa: S310 - our own URL
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    events: list[tuple[float, str]] = []
    received, finishes, is_whole, begun_s = 0, 0, False, time.monotonic()
    with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:  # noqa: S310 - our own URL
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                is_whole = True
                break
            for choice in json.loads(line[6:]).get("choices", []):
                events.append((time.monotonic() - begun_s, choice["text"]))
                received += len(choice.get("token_ids") or [])
                finishes += choice["finish_reason"] is not None
            if strike is not None and received >= at:
                strike()
                strike = None
    return Streamed(events, received, finishes, is_whole)


def _around(events: list[tuple[float, str]]) -> tuple[str, str]:
    """Some words before and behind the kill, on one line each; an event is a token."""
    texts, length = [text for _, text in events], _WIDTH - 8
    return "".join(texts[:KILL_AT])[-length:].strip(), "".join(texts[KILL_AT:])[:length].strip()


def options_of(doc: str | None, file: str | None = None) -> argparse.Namespace:
    """`--out`, and the interpreter of vLLM's environment."""
    parser = parser_of(doc, file)
    parser.add_argument(
        "--python",
        default=os.environ.get(PYTHON_ENV),
        help=f"interpreter of an environment with vLLM (default: {PYTHON_ENV})",
    )
    options = parser.parse_args()
    if options.python is None:
        parser.error(
            f"--python, or {PYTHON_ENV}: an environment with vLLM (make demo-vllm has one)"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
