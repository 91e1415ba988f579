"""What OpenTelemetry's environment variables ask for."""

import random
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from kvrs.errors import ConfigError
from kvrs.tracing.settings import Sampler, TraceSettings, trace_settings

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
TRACE_IDS = [random.Random(seed).getrandbits(128) for seed in range(200)]


def settings(**environ: str) -> TraceSettings:
    found = trace_settings(ENDPOINT | environ, "kvrs-proxy", "proxy-0")
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
    """As OpenTelemetry's variables say it."""
    assert trace_settings(environ, "kvrs-proxy", "proxy-0") is None


def test_a_variable_for_traces_comes_before_that_for_all_signals() -> None:
    """An address for traces is the whole one, the other that of the collector."""
    given = settings(
        OTEL_EXPORTER_OTLP_HEADERS="a=b",
        OTEL_EXPORTER_OTLP_TRACES_HEADERS="api-key=x%20y, z=",
        OTEL_EXPORTER_OTLP_TIMEOUT="2500",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
    )

    assert given.url == "http://c:4318/v1/traces"
    assert given.headers == {"api-key": "x y", "z": ""}
    assert (given.timeout_s, given.is_packed) == (2.5, True)
    assert settings(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="https://d/own").url == "https://d/own"


def test_a_batch_is_no_larger_than_what_may_wait() -> None:
    """A batch that is never full would be sent by time only."""
    given = settings(OTEL_BSP_MAX_QUEUE_SIZE="10", OTEL_BSP_SCHEDULE_DELAY="200")

    assert (given.batch_spans, given.most_spans, given.delay_s) == (10, 10, 0.2)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_a_ratio_takes_the_traces_that_the_library_takes(ratio: float) -> None:
    """Services with the same ratio take the same traces, in whatever they are written."""
    theirs = TraceIdRatioBased(ratio)

    for trace_id in TRACE_IDS:
        taken = theirs.should_sample(None, trace_id, "x").decision is Decision.RECORD_AND_SAMPLE
        assert Sampler(ratio, follows_client=False).takes(trace_id, True) is taken
        assert Sampler(ratio).takes(trace_id, None) is taken
        assert Sampler(ratio).takes(trace_id, True) is True
        assert Sampler(ratio).takes(trace_id, False) is False


@pytest.mark.parametrize(
    ("name", "argument", "sampler"),
    [
        ("", "", Sampler(1.0, follows_client=True)),
        ("always_on", "", Sampler(1.0, follows_client=False)),
        ("always_off", "", Sampler(0.0, follows_client=False)),
        ("traceidratio", "0.25", Sampler(0.25, follows_client=False)),
        ("parentbased_traceidratio", "0.25", Sampler(0.25, follows_client=True)),
        ("parentbased_always_off", "0.25", Sampler(0.0, follows_client=True)),
    ],
)
def test_samplers_have_the_names_of_the_specification(
    name: str, argument: str, sampler: Sampler
) -> None:
    """The ratio is of those that have one."""
    given = settings(OTEL_TRACES_SAMPLER=name, OTEL_TRACES_SAMPLER_ARG=argument)

    assert given.sampler == sampler


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
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "'jaeger_remote'; allowed: always_on"),
        ("OTEL_TRACES_SAMPLER_ARG", "1.5", "'1.5'; allowed: from 0 to 1"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "'0'; allowed: a number from 1"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name: str, value: str, allowed: str) -> None:
    """Spans that go nowhere would be missed later."""
    environ: dict[str, Any] = {name: value}
    if name == "OTEL_TRACES_SAMPLER_ARG":
        environ["OTEL_TRACES_SAMPLER"] = "traceidratio"

    with pytest.raises(ConfigError) as fault:
        settings(**environ)

    assert name in str(fault.value) or "ENDPOINT" in str(fault.value)
    assert allowed in str(fault.value)
