"""Expected failures: mistakes of the user, failures of the world. Our own bugs are assertions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec

# Optional packages, by the extra of the distribution that installs them (pyproject.toml).
_ENGINE = ("jinja2", "llguidance", "numpy", "safetensors", "torch")
_REPORT = ("matplotlib", "numpy", "scipy")
EXTRAS = {
    "engine": _ENGINE,
    "report": _REPORT,
    "lab": (*_REPORT, "optuna"),
    "ray": (*_ENGINE, "ray"),
    "kubernetes": ("kubernetes_asyncio",),
    "tune": ("optuna",),
    "tracing": (
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry.sdk",
        "opentelemetry.trace",
    ),
    "distserve": (*_ENGINE, "filelock", "huggingface_hub", "psutil", "ray", "transformers"),
}
_BEYOND_NUMBERS = 1e9  # Seconds, rates and factors that are larger are mistakes, as nan is.


class KvrsError(Exception):
    """Base of every error that kvrs raises on purpose. `is_of_prefill`: it is the end of a prefill
    call, for which the decode call that goes with it was given up.
    """

    is_of_prefill = False


class ConfigError(KvrsError):
    """The configuration is wrong. `faults` holds one line per fault: path, value, what is
    allowed.
    """

    def __init__(self, faults: str | list[str]) -> None:
        self.faults = [faults] if isinstance(faults, str) else faults
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        # A worker process may have raised it.
        return ConfigError, (self.faults,)


def numbers_out_of_range(
    options: Iterable[tuple[str, float | None]], *, zero: bool
) -> Iterator[str]:
    """The faults of options by name that are no numbers from above 0, or 0 with `zero`."""
    allowed = f"{'0 or more' if zero else 'above 0'}, below {_BEYOND_NUMBERS:g}"
    for name, value in options:
        if value is not None and not (0 < value < _BEYOND_NUMBERS or (zero and value == 0)):
            yield f"{name}: got {value}; allowed: {allowed}"


class MissingExtraError(KvrsError):
    """Packages of an extra are not installed; the message has the command that installs them."""


def check_extras(*extras: str) -> None:
    """Check that the packages of these extras are installed, without importing them.

    Raises:
        MissingExtraError: some are not.
    """
    extra_of = {module: extra for extra in extras for module in EXTRAS[extra]}
    absent = [module for module in extra_of if not _is_installed(module)]
    if absent:
        wanted = ",".join(dict.fromkeys(extra_of[module] for module in absent))
        raise MissingExtraError(
            f"not installed: {', '.join(absent)}; to install: pip install 'kvrs[{wanted}]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # The package that it would be in is not installed either.
        return False


class TraceError(KvrsError):
    """A trace is wrong; the message names file, line and reason."""


class RequestError(KvrsError):
    """A client's request is wrong (HTTP 4xx). `param` names the field and `code` the kind, as the
    OpenAI error body does; `kind` is its type, where that does not follow from the status.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        *,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.kind = kind
        self.headers = headers or {}


class UnknownFieldError(RequestError):
    """The body of a request has a field that its endpoint does not know, which it names."""

    def __init__(self, name: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"{name[:80]!r} is not known; allowed: {', '.join(allowed)}", param=name[:80]
        )


class TransferError(KvrsError):
    """A page transfer failed: peer gone, refused at the hand-shake, bad frame, bad checksum, or too
    slow.
    """


class DamagedPageError(TransferError):
    """A page arrived whole, but its checksum or mac differs from the sender's: memory, a link, an
    attacker on it, or an injected fault.
    """


class UpstreamError(KvrsError):
    """An engine failed while it served a stream: reset, end without a finish, error event, or
    silence.
    """


class GossipError(KvrsError):
    """A gossip packet or a record in it is malformed or exceeds a bound; the message says which."""


class LogError(KvrsError):
    """An event log cannot be read or run again; the message names line and reason."""


class RanksLostError(KvrsError):
    """Ranks of an instance have died, or were killed because they hung. `status`: of the process
    that did, below 0 minus the signal that ended it; None: it is not known.
    """

    def __init__(self, ranks: Sequence[int], reason: str, status: int | None = None) -> None:
        numbers = ", ".join(map(str, ranks))
        super().__init__(f"rank {numbers} {reason}")
        self.ranks, self.reason = tuple(ranks), reason
        self.status = status


class LayoutError(KvrsError):
    """An instance cannot be laid out over its ranks as it was asked."""
