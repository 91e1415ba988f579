"""Traces that OpenTelemetry's environment variables ask for."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.errors import ConfigError
from kvrs.tracing.settings import TraceSettings, trace_settings

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}


def settings(**environ: str) -> TraceSettings:
    found = trace_settings(ENDPOINT | environ)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        ENDPOINT | {"OTEL_SDK_DISABLED": "true"},
        ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_a_collector_there_are_no_traces(environ: dict[str, str]) -> None:
    """Booleans have the form of OpenTelemetry's specification."""
    assert trace_settings(environ) is None


def test_a_variable_for_traces_comes_before_that_for_all_signals() -> None:
    """Milliseconds, as the specification says; the SDK would take seconds."""
    given = settings(OTEL_EXPORTER_OTLP_TIMEOUT="2500")
    own = settings(OTEL_EXPORTER_OTLP_TIMEOUT="x", OTEL_EXPORTER_OTLP_TRACES_TIMEOUT="500")

    assert (given.timeout_s, own.timeout_s) == (2.5, 0.5)


def test_a_batch_is_no_larger_than_what_may_wait() -> None:
    """A batch that is never full would be sent by time only."""
    given = settings(OTEL_BSP_MAX_QUEUE_SIZE="10", OTEL_BSP_SCHEDULE_DELAY="200")

    assert (given.batch_spans, given.max_spans, given.delay_ms) == (10, 10, 200)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "grpc; allowed: otlp over http/protobuf"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "zipkin over http/protobuf; allowed: otlp"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "'zstd'; allowed: none, gzip"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "c:4318", "'c:4318'; allowed: http://HOST:PORT"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1", "'http://[::1'; allowed: http://HOST:PORT"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:70000", "http://c:70000'; allowed: http://HOST"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret", "'secret'; allowed: key=value"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "nowhere.pem", "'nowhere.pem'"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "'jaeger_remote'; allowed: always_on"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.5", "'1.5'; allowed: from 0 to 1"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "'0'; allowed: a number from 1"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name: str, value: str, allowed: str) -> None:
    """Spans that go nowhere would be missed later."""
    with pytest.raises(ConfigError) as fault:
        settings(**{name: value})

    assert name in str(fault.value) or "ENDPOINT" in str(fault.value) or "*" in str(fault.value)
    assert allowed in str(fault.value)


def test_traces_without_the_extra_are_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the start of a process, and by `kvrs config check`; without traces nothing is missing."""
    monkeypatch.setattr("kvrs.errors.find_spec", lambda module: None)
    (file := tmp_path / "kvrs.yaml").write_text("{}")
    check = ["config", "check", str(file)]

    assert CliRunner().invoke(app, check).exit_code == 0
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")

    with pytest.raises(ConfigError, match=r"ENDPOINT: not installed: .*'kvrs\[tracing\]'"):
        settings()
    with pytest.raises(ConfigError, match=r"ENDPOINT: not installed: .*'kvrs\[tracing\]'"):
        CliRunner().invoke(app, check, catch_exceptions=False)
