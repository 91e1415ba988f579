"""Errors that kvrs expects: mistakes of the user, failures of the world. Bugs of kvrs are
assertions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec

# Packages that each extra of the distribution installs (pyproject.toml), by which a missing extra
# is found.
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
# Ends of plurals, by the last letter of the singular.
_PLURALS = {"y": "ies", "Y": "IES"}
# Bound of options in seconds, rates and factors: a larger number, like nan, is a mistake.
_BEYOND_NUMBERS = 1e9


class KvrsError(Exception):
    """Base of every error that kvrs raises on purpose. `is_of_prefill`: the prefill call failed,
    and for that reason its decode call was closed.
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
        # Keep the error picklable, because worker processes send it.
        return ConfigError, (self.faults,)


def nearest(name: str, names: Sequence[str], before: str = "") -> str:
    """Return the end of a message about an unknown name: the name that resembles it, behind what is
    `before` it; empty: none does.
    """
    # Another name may resemble "proxies" more than "proxy" does.
    forms = {each[:-1] + _PLURALS[each[-1:]]: each for each in names if each[-1:] in _PLURALS}
    forms |= {each: each for each in names}
    near = get_close_matches(name, forms, n=1)
    return f"; the nearest one is {before}{forms[near[0]]}" if near else ""


def numbers_out_of_range(
    options: Iterable[tuple[str, float | None]], *, zero: bool
) -> Iterator[str]:
    """Yield a fault for each named option whose value is not above 0 (with `zero`: not 0 or more),
    or not below 1e9. A value of None is not checked.
    """
    allowed = f"{'0 or more' if zero else 'above 0'}, below {_BEYOND_NUMBERS:g}"
    for name, value in options:
        if value is not None and not (0 < value < _BEYOND_NUMBERS or (zero and value == 0)):
            yield f"{name}: got {value}; allowed: {allowed}"


class MissingExtraError(KvrsError):
    """Packages of an extra are not installed; the message has the command that installs them."""


def check_extras(*extras: str) -> None:
    """Check that the packages of these extras are installed, without importing them.

    Raises:
        MissingExtraError: some are not installed.
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
    except ModuleNotFoundError:  # The parent package of `name` is missing.
        return False


class TraceError(KvrsError):
    """A trace is wrong; the message names file, line and reason."""


class RequestError(KvrsError):
    """A client's request is wrong (HTTP 4xx). `param` names the field, `code` the kind of mistake,
    as in OpenAI's error body; `kind` is the body's type, if it differs from the status's usual
    type.
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
    """A request's body has a field that its endpoint does not know; the message names the field."""

    def __init__(self, name: str, allowed: Sequence[str]) -> None:
        name = name[:80]
        super().__init__(
            f"{name!r} is not known; allowed: {', '.join(allowed)}{nearest(name, allowed)}",
            param=name,
        )


class TransferError(KvrsError):
    """A page transfer failed: peer gone, hand-shake refused, bad frame or checksum, too slow."""


class DamagedPageError(TransferError):
    """A page arrived complete, but its checksum or MAC is wrong: damage in memory or on a link, an
    attack, or an injected fault.
    """


class UpstreamError(KvrsError):
    """An engine failed while it served a stream: reset, end without a finish, error event, or
    silence.
    """


class UndecodableError(KvrsError):
    """The output of a model, or what an engine's parser made of it, cannot be passed on in the form
    of the client's API. The message quotes nothing of the output. No instance is to blame.
    """


class GossipError(KvrsError):
    """A gossip packet or a record in it is malformed or exceeds a bound; the message says which."""


class LogError(KvrsError):
    """An event log cannot be read or run again; the message names the line and the reason."""


class RanksLostError(KvrsError):
    """Ranks of an instance have died, or were killed because they hung. `status` is the exit status
    of the first process, below 0 minus the signal; None: unknown.
    """

    def __init__(self, ranks: Sequence[int], reason: str, status: int | None = None) -> None:
        numbers = ", ".join(map(str, ranks))
        super().__init__(f"rank {numbers} {reason}")
        self.ranks, self.reason = tuple(ranks), reason
        self.status = status


class LayoutError(KvrsError):
    """An instance cannot be divided over its ranks as requested."""
