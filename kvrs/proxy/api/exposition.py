"""Metrics as text for Prometheus. Of one scrape to the next most lines stay as they are, and of the
others all but the number: they are kept, since to render a thousand lines takes ten milliseconds of
the event loop.
"""

from collections.abc import Callable, Mapping

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

_number: Callable[[float], str] = floatToGoString  # The library has no annotation.

_OPEN_METRICS = "application/openmetrics-text"


class Exposition:
    """Of one registry; it has no exemplars and no times of its own."""

    def __init__(self) -> None:
        self._families: dict[tuple[bool, str], _Family] = {}

    def render(self, registry: Collector, accept: str) -> tuple[bytes, str]:
        """The text, and its content type: OpenMetrics where `accept`, a request's header, asks for
        it.
        """
        _, content_type = choose_encoder(accept)
        is_open = content_type.startswith(_OPEN_METRICS)
        parts = [self._family(metric, is_open).text_of(metric) for metric in registry.collect()]
        if is_open:
            parts.append("# EOF\n")
        return "".join(parts).encode(), content_type

    def _family(self, metric: Metric, is_open: bool) -> "_Family":
        key = is_open, metric.name
        if (family := self._families.get(key)) is None:
            family = self._families[key] = _Family(_head_of(metric, is_open))
        return family


class _Family:
    """What was rendered of the samples of one name."""

    def __init__(self, head: str) -> None:
        self._head = self._text = head
        self._samples: list[Sample] = []
        self._lines: list[tuple[str, str]] = []  # Name with labels, and number.

    def text_of(self, metric: Metric) -> str:
        samples = metric.samples
        if samples != self._samples:
            before = zip(self._samples, self._lines, strict=True)
            self._lines = [_line_of(sample, *next(before, (None, _NO_LINE))) for sample in samples]
            self._samples = [*samples]
            self._text = "".join([self._head, *(part for line in self._lines for part in line)])
        return self._text


_NO_LINE = "", ""


def _line_of(sample: Sample, before: Sample | None, line: tuple[str, str]) -> tuple[str, str]:
    if before is sample:
        return line
    if before is None or before.name != sample.name or before.labels != sample.labels:
        return _named(sample.name, sample.labels), f"{_number(sample.value)}\n"
    if before.value == sample.value:
        return line
    return line[0], f"{_number(sample.value)}\n"


def _named(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return f"{name} "
    shown = ",".join(f'{key}="{_quoted(labels[key])}"' for key in sorted(labels))
    return f"{name}{{{shown}}} "


def _head_of(metric: Metric, is_open: bool) -> str:
    """Lines of help and type. The older format names a counter as its samples."""
    name, kind, words = metric.name, metric.type, metric.documentation
    if is_open:
        words = _quoted(words)
    else:
        words = words.replace("\\", r"\\").replace("\n", r"\n")
        name += {"counter": "_total", "info": "_info"}.get(kind, "")
        kind = {"info": "gauge", "unknown": "untyped"}.get(kind, kind)
    return f"# HELP {name} {words}\n# TYPE {name} {kind}\n"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
