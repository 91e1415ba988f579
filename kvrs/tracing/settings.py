"""Settings of traces in OpenTelemetry's environment variables, and faults of these variables.

The SDK reads the variables too, but it ignores a wrong value with a line in the log, and takes
`OTEL_EXPORTER_OTLP_TIMEOUT` for seconds.

Sources: OpenTelemetry specification 1.x, "Environment Variable Specification", "OTLP Exporter
Configuration" and "Sampling".
"""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrs.errors import ConfigError, MissingExtraError, check_extras
from kvrs.net.origins import has_origin

_EXPORTER = "OTEL_EXPORTER_OTLP_"
_ENDPOINTS = (f"{_EXPORTER}TRACES_ENDPOINT", f"{_EXPORTER}ENDPOINT")
_PROTOCOL = "http/protobuf"
_COMPRESSIONS = ("none", "gzip")
_SAMPLERS = tuple(
    prefix + kind
    for prefix in ("", "parentbased_")
    for kind in ("always_on", "always_off", "traceidratio")
)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Numbers that are read here, so that wrong values are refused; the SDK reads all other
    variables by itself.
    """

    timeout_s: float  # Time limit of a batch, including retries.
    delay_ms: int  # Interval between batches, unless a batch is full before.
    batch_spans: int
    max_spans: int  # Most spans that wait to be sent; further spans displace the oldest.


def trace_settings(environ: Mapping[str, str]) -> TraceSettings | None:
    """Read the variables; None: no traces are configured.

    Raises:
        ConfigError: a variable has an unsupported value, or the extra `tracing` is not installed.
    """
    endpoint = next((name for name in _ENDPOINTS if environ.get(name)), None)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if endpoint is None or is_off or exporter == "none":
        return None
    given = _Variables(environ)
    try:
        check_extras("tracing")
    except MissingExtraError as error:
        given.faults.append(f"{endpoint}: {error}")
    protocol = given.of_exporter("PROTOCOL") or _PROTOCOL
    if exporter != "otlp" or protocol != _PROTOCOL:
        given.faults.append(
            f"{endpoint}: got {exporter} over {protocol}; allowed: otlp over {_PROTOCOL}"
        )
    if not has_origin(url := environ[endpoint]):
        given.faults.append(f"{endpoint}: got {url!r:.80}; allowed: http://HOST:PORT or https://")
    given.choice(given.name_of("COMPRESSION"), _COMPRESSIONS)
    given.choice("OTEL_TRACES_SAMPLER", _SAMPLERS)
    given.share("OTEL_TRACES_SAMPLER_ARG")
    given.pairs(given.name_of("HEADERS"))
    given.pairs("OTEL_RESOURCE_ATTRIBUTES")
    given.certificates()
    max_spans = given.number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
    settings = TraceSettings(
        timeout_s=given.number(given.name_of("TIMEOUT"), 10_000) / 1000,
        delay_ms=given.number("OTEL_BSP_SCHEDULE_DELAY", 5000),
        batch_spans=min(given.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512), max_spans),
        max_spans=max_spans,
    )
    if given.faults:
        raise ConfigError(given.faults)
    return settings


class _Variables:
    """Checks the variables and collects their faults. An empty variable counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.faults: list[str] = []

    def name_of(self, key: str) -> str:
        """Return the name of the variable that sets this key of the exporter: the variable for
        traces if it is set, else that for all signals.
        """
        name = f"{_EXPORTER}TRACES_{key}"
        return name if self._environ.get(name) else f"{_EXPORTER}{key}"

    def of_exporter(self, key: str) -> str | None:
        return self._environ.get(self.name_of(key)) or None

    def choice(self, name: str, allowed: Sequence[str]) -> None:
        value = self._environ.get(name) or allowed[0]
        if value not in allowed:
            self.faults.append(f"{name}: got {value!r:.80}; allowed: {', '.join(allowed)}")

    def number(self, name: str, default: int) -> int:
        text = self._environ.get(name) or str(default)
        if not (text.isascii() and text.isdigit() and int(text) >= 1):
            self.faults.append(f"{name}: got {text!r:.80}; allowed: a number from 1")
            return default
        return int(text)

    def share(self, name: str) -> None:
        text = self._environ.get(name) or "1"
        try:
            is_share = 0 <= float(text) <= 1
        except ValueError:
            is_share = False
        if not is_share:
            self.faults.append(f"{name}: got {text!r:.80}; allowed: from 0 to 1")

    def pairs(self, name: str) -> None:
        """Note a fault unless the variable has the form `key=value,key=value`."""
        for part in filter(None, map(str.strip, self._environ.get(name, "").split(","))):
            key, equals, _ = part.partition("=")
            if not equals or not key.strip():
                self.faults.append(f"{name}: got {part!r:.80}; allowed: key=value, by commas")

    def certificates(self) -> None:
        """Note a fault for each certificate file that cannot be used: the exporter reads them only
        with the first batch.
        """
        names = "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"
        authorities, certificate, key = files = [*map(self.of_exporter, names)]
        if not any(files):
            return
        try:
            for each in filter(None, files):
                Path(each).read_bytes()
            context = ssl.create_default_context(cafile=authorities)
            if certificate is not None:
                context.load_cert_chain(certificate, key)
        except OSError as error:  # OSError includes ssl.SSLError.
            self.faults.append(f"{_EXPORTER}*CERTIFICATE, *KEY: {error}")
