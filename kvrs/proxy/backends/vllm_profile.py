"""`kvrs profile --url` measures the prefills of a running vLLM and writes a profile file.

The prompts have random ids, a salt each so that no prefix cache has them, and one token of output:
the time from request to answer is a proxy's view of a prefill.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from kvrs.config.origin import ALLOWED_URL, place_of
from kvrs.errors import ConfigError, UpstreamError
from kvrs.profiles.catalog import PrefillPoints, Profile, faults_of_out, write_profile
from kvrs.proxy.backends.cluster import VLLM_API_KEY
from kvrs.proxy.backends.model_files import ModelFiles, fault_of_model, find_model
from kvrs.proxy.backends.stock_facts import ListedModel, ListedModels
from kvrs.proxy.backends.vllm_metrics import VllmMetrics

SHORTEST_TOKENS, LONGEST_TOKENS = 128, 16_384
_SHORTEST_OF_ALL = 16  # Tokens of the shortest measured prompt, for a model whose context is short.
# First id and number of ids that prompts are drawn from: every vocabulary has these.
_FIRST_ID, _IDS = 3, 250
_TIMEOUT_S = 600.0
_SHOWN_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmProfileOptions:
    """Options of `kvrs profile --url`."""

    url: str
    out: Path
    # Directory of the model, or its name in the Hugging Face cache; None: the model that vLLM
    # names.
    model: str | None = None
    label: str | None = None  # Label of the profile; None: the model's name.
    # Longest measured prompt; None: 16,384 tokens, or the model's limit.
    longest_tokens: int | None = None
    repeats: int = 3  # Measurements per length; the median counts.


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Completion(msgspec.Struct):
    usage: _Usage


def run_vllm_profile(
    options: VllmProfileOptions,
    environ: Mapping[str, str],
    tell: Callable[[int, int], None] = lambda _done, _all: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Path:
    """Measure prefills, write the profile, and return its path. `tell` is called with the number of
    prompts computed so far and of all prompts.

    Raises:
        ConfigError: a wrong option, or a server that cannot be measured; nothing is written.
    """
    faults = faults_of_out(options.out)
    if place_of(options.url) is None:
        faults.append(f"--url: got {options.url!r}; allowed: {ALLOWED_URL}")
    if options.model is not None and find_model(options.model) is None:
        faults.append(fault_of_model(options.model).replace("cluster.model", "--model", 1))
    if faults:
        raise ConfigError(faults)
    with closing(_Server(options.url, environ.get(VLLM_API_KEY))) as server:
        model = server.model()
        seconds = _measured(server, model, options, tell, clock)
        profile = _profile(options, server, model, seconds)
    return write_profile(profile, options.out)


def _measured(
    server: "_Server",
    model: ListedModel,
    options: VllmProfileOptions,
    tell: Callable[[int, int], None],
    clock: Callable[[], float],
) -> dict[int, float]:
    """Return the median seconds of a prefill by the number of its tokens."""
    lengths = lengths_up_to(options.longest_tokens, model.max_model_len)
    total, done = len(lengths) * options.repeats + 1, 0
    seconds: dict[int, float] = {}
    server.refuse_busy()
    server.prefill(model.id, lengths[0])  # Not measured: the first prompt compiles kernels.
    tell(done := done + 1, total)
    for tokens in lengths:
        server.refuse_busy()
        taken: list[float] = []
        for _ in range(options.repeats):
            began_s = clock()
            server.prefill(model.id, tokens)
            taken.append(clock() - began_s)
            tell(done := done + 1, total)
        seconds[tokens] = median(taken)
    return seconds


def lengths_up_to(longest_tokens: int | None, max_model_len: int | None) -> list[int]:
    """Return the prompt lengths to measure, in tokens: each is twice the length before.

    Raises:
        ConfigError: fewer than two lengths.
    """
    # One token of the context is left for the output.
    limit = (max_model_len or LONGEST_TOKENS + 1) - 1
    longest = min(longest_tokens or LONGEST_TOKENS, limit)
    shortest = SHORTEST_TOKENS if longest >= 2 * SHORTEST_TOKENS else _SHORTEST_OF_ALL
    if longest < 2 * shortest:
        raise ConfigError(
            f"--longest-tokens: got {longest} (the model takes {limit}); allowed: at least "
            f"{2 * shortest}"
        )
    return [*_doubled(shortest, longest)]


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _profile(
    options: VllmProfileOptions, server: "_Server", model: ListedModel, seconds: dict[int, float]
) -> Profile:
    files = ModelFiles(options.model).of(model.root or model.id)
    geometry = files.geometry(server.metrics().page_size_tokens)
    name = model.root or model.id
    source = f"config.json of {files.directory}"
    if files.directory is None:
        source = f"assumed: that of Llama-3.1-8B in 16 bits, since no files of {name} were here"
    return Profile(
        label=options.label or f"{Path(name).name.lower()}-vllm",
        model=name,
        dtype="as served",
        gpu=None,
        tp=None,
        engine="vLLM",
        version=server.version(),
        kind="measured",
        source=f"kvrs profile --url {options.url}: prompts of random ids with one token of output, "
        f"one at a time over HTTP, median of {options.repeats}",
        geometry=geometry,
        geometry_source=source,
        prefill=PrefillPoints(seconds),
    )


class _Server:
    """Client of the vLLM to measure, over one connection; each call blocks until the answer."""

    def __init__(self, url: str, api_key: str | None) -> None:
        place = place_of(url)
        assert place is not None, url
        self._url = url.rstrip("/")
        self._connection = HTTPConnection(*place, timeout=_TIMEOUT_S)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def close(self) -> None:
        self._connection.close()

    def model(self) -> ListedModel:
        found: ListedModels = self._read("/v1/models", ListedModels)
        model = next((each for each in found.data if each.parent is None), None)
        if model is None:
            raise ConfigError(f"{self._url}: its /v1/models names no model")
        return model

    def version(self) -> str:
        return str(self._read("/version", dict[str, Any]).get("version"))

    def metrics(self) -> VllmMetrics:
        return VllmMetrics(self._ask("GET", "/metrics").decode(errors="replace"))

    def refuse_busy(self) -> None:
        """Check that the server is idle, because other requests would change the measured times.
        Raises ConfigError.
        """
        try:
            metrics = self.metrics()
            running, waiting = metrics.running, metrics.waiting
        except UpstreamError as error:
            raise ConfigError(f"{self._url}: {error}") from None
        if running + waiting:
            raise ConfigError(
                f"{self._url}: {running} requests run there and {waiting} wait; allowed: none, "
                f"since their work would be measured too (and this would delay them)"
            )

    def prefill(self, model: str, tokens: int) -> None:
        fields = {
            "model": model,
            "prompt": [_FIRST_ID + each % _IDS for each in os.urandom(tokens)],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": secrets.token_hex(16),
        }
        answer = self._read("/v1/completions", _Completion, msgspec.json.encode(fields))
        if answer.usage.prompt_tokens != tokens:
            raise ConfigError(
                f"{self._url}: it counts {answer.usage.prompt_tokens} tokens of a prompt of "
                f"{tokens} ids; allowed: a server that takes ids"
            )

    def _read(self, path: str, kind: type[Any], body: bytes | None = None) -> Any:
        answer = self._ask("GET" if body is None else "POST", path, body)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self._url}{path}: not the answer of a vLLM: {error}") from None

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        try:
            self._connection.request(method, path, body, headers=self._headers)
            response = self._connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            self._connection.close()
            cause = str(error) or type(error).__name__
            raise ConfigError(f"{self._url}{path}: {cause}; allowed: a vLLM that runs") from None
        if response.status != 200:
            shown = answer[:_SHOWN_BYTES].decode(errors="replace").strip()
            raise ConfigError(f"{self._url}{path}: HTTP {response.status}: {shown}")
        return answer
