"""Where traces go and which requests have one, by OpenTelemetry's environment variables. Pure.

Sources: OpenTelemetry specification 1.x, "Environment Variable Specification", "OTLP Exporter
Configuration" and "Sampling".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

from kvrs import __version__
from kvrs.errors import ConfigError
from kvrs.origins import has_origin

_EXPORTER = "OTEL_EXPORTER_OTLP_"
_ENDPOINTS = (f"{_EXPORTER}TRACES_ENDPOINT", f"{_EXPORTER}ENDPOINT")
_PROTOCOL = "http/protobuf"
_COMPRESSIONS = ("none", "gzip")
_PARENT_BASED = "parentbased_"
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_ID_BITS = 64  # Of a trace id, which decide whether it is within the ratio.


@dataclass(frozen=True)
class Sampler:
    """Which requests have a trace. The choice of a trace follows from its id, so that all services
    with the same ratio choose the same ones.
    """

    ratio: float = 1.0
    follows_client: bool = True  # A request within a trace is taken if that trace is.

    def takes(self, trace_id: int, client_takes: bool | None) -> bool:
        """`client_takes`: what the client says of its trace; None: it has none."""
        if self.follows_client and client_takes is not None:
            return client_takes
        return trace_id & ((1 << _ID_BITS) - 1) < self._bound

    @cached_property
    def _bound(self) -> int:
        return round(self.ratio * (1 << _ID_BITS))  # Takes ten microseconds.


@dataclass(frozen=True, slots=True)
class TraceSettings:
    url: str
    headers: Mapping[str, str]
    timeout_s: float  # For one batch, with what is tried again.
    is_packed: bool  # By gzip.
    sampler: Sampler
    resource: Mapping[str, str]
    delay_s: float  # Between two batches, unless one is full before.
    batch_spans: int
    most_spans: int  # That wait to be sent; further ones are dropped.
    ca_file: str | None = None
    certificate_file: str | None = None  # Of this client, with its key.
    key_file: str | None = None


def trace_settings(environ: Mapping[str, str], service: str, instance: str) -> TraceSettings | None:
    """Of one process of a service; None: no traces are asked for.

    Raises:
        ConfigError: a variable has a value that cannot be carried out.
    """
    endpoint = next((name for name in _ENDPOINTS if environ.get(name)), None)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if endpoint is None or is_off or exporter == "none":
        return None
    given = _Variables(environ)
    protocol = given.of_exporter("PROTOCOL") or _PROTOCOL
    if exporter != "otlp" or protocol != _PROTOCOL:
        given.faults.append(
            f"{endpoint}: got {exporter} over {protocol}; allowed: otlp over {_PROTOCOL}"
        )
    compression = given.of_exporter("COMPRESSION") or "none"
    if compression not in _COMPRESSIONS:
        given.faults.append(
            f"{_EXPORTER}COMPRESSION: got {compression!r}; allowed: {', '.join(_COMPRESSIONS)}"
        )
    most_spans = given.number("OTEL_BSP_MAX_QUEUE_SIZE", 2048, least=1)
    settings = TraceSettings(
        url=given.url(endpoint),
        headers=given.of_exporter_pairs("HEADERS"),
        timeout_s=given.of_exporter_ms("TIMEOUT", 10_000) / 1000,
        is_packed=compression == "gzip",
        sampler=given.sampler(),
        resource=_resource(given, service, instance),
        delay_s=given.number("OTEL_BSP_SCHEDULE_DELAY", 5000, least=1) / 1000,
        batch_spans=min(given.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512, least=1), most_spans),
        most_spans=most_spans,
        ca_file=given.of_exporter("CERTIFICATE"),
        certificate_file=given.of_exporter("CLIENT_CERTIFICATE"),
        key_file=given.of_exporter("CLIENT_KEY"),
    )
    if given.faults:
        raise ConfigError(given.faults)
    return settings


class _Variables:
    """Reads them, and keeps the faults of all. An empty one counts as not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.faults: list[str] = []

    def text(self, name: str) -> str | None:
        return self._environ.get(name) or None

    def name_of(self, key: str) -> str:
        """Of an exporter's variable: that for traces comes before that for all signals."""
        name = f"{_EXPORTER}TRACES_{key}"
        return name if self._environ.get(name) else f"{_EXPORTER}{key}"

    def of_exporter(self, key: str) -> str | None:
        return self._environ.get(self.name_of(key)) or None

    def of_exporter_ms(self, key: str, default: int) -> int:
        return self.number(self.name_of(key), default, least=1)

    def of_exporter_pairs(self, key: str) -> dict[str, str]:
        return self.pairs(self.name_of(key))

    def number(self, name: str, default: int, *, least: int) -> int:
        text = self._environ.get(name) or str(default)
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            self.faults.append(f"{name}: got {text!r:.80}; allowed: a number from {least}")
            return default
        return int(text)

    def pairs(self, name: str) -> dict[str, str]:
        """`key=value,key=value`, with %-escapes."""
        found = {}
        for part in filter(None, map(str.strip, self._environ.get(name, "").split(","))):
            key, equals, value = map(str.strip, part.partition("="))
            if not equals or not key:
                self.faults.append(f"{name}: got {part!r:.80}; allowed: key=value, by commas")
            found[unquote(key)] = unquote(value)
        return found

    def url(self, name: str) -> str:
        """That for traces is the whole address, the other one that of the collector."""
        url = self._environ[name]
        if not has_origin(url):
            self.faults.append(f"{name}: got {url!r:.80}; allowed: http://HOST:PORT or https://")
        return url if name == _ENDPOINTS[0] else url.rstrip("/") + "/v1/traces"

    def sampler(self) -> Sampler:
        name = self._environ.get("OTEL_TRACES_SAMPLER") or f"{_PARENT_BASED}always_on"
        kind = name.removeprefix(_PARENT_BASED)
        if kind not in _SAMPLERS:
            allowed = ", ".join((*_SAMPLERS, *(_PARENT_BASED + each for each in _SAMPLERS)))
            self.faults.append(f"OTEL_TRACES_SAMPLER: got {name!r:.80}; allowed: {allowed}")
        ratio = {"always_off": 0.0, "traceidratio": self._ratio()}.get(kind, 1.0)
        return Sampler(ratio, follows_client=kind != name)

    def _ratio(self) -> float:
        text = self._environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
        try:
            ratio = float(text)
        except ValueError:
            ratio = -1.0
        if 0 <= ratio <= 1:
            return ratio
        self.faults.append(f"OTEL_TRACES_SAMPLER_ARG: got {text!r:.80}; allowed: from 0 to 1")
        return 1.0


def _resource(given: _Variables, service: str, instance: str) -> dict[str, str]:
    own = {
        "service.name": service,
        "service.version": __version__,
        "service.instance.id": instance,
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "kvrs",
        "telemetry.sdk.version": __version__,
    }
    named = given.pairs("OTEL_RESOURCE_ATTRIBUTES")
    if named_service := given.text("OTEL_SERVICE_NAME"):
        named["service.name"] = named_service
    return own | named
