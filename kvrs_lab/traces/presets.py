"""Settings of the generator by name, from published statistics of each workload.

Lengths are lognormal. A known mean and median fix the distribution: p50 is the median and sigma is
sqrt(2 ln(mean / median)). Workloads with shared prefixes are conversations whose settings were
fitted to the published means and hit ratio. Unpublished values are marked.
`tests/traces/test_presets.py` has the statistics, and compares.
"""

from dataclasses import replace

from kvrs_lab.traces.generator import GeneratorSettings

# Single requests without shared prefixes: the first message is the whole prompt.
_ALONE = GeneratorSettings(turns_mean=1.0, system_tokens=0)

PRESETS: dict[str, GeneratorSettings] = {
    # Mooncake, FAST'25 trace release, conversation_trace.jsonl: counted over its 12,031 requests
    # (means also in table 2).
    "mooncake-conversation": GeneratorSettings(),
    # vLLM (SOSP'23, figure 11): means of ShareGPT. Spread and arrivals are unpublished: sigma 1 and
    # one request per second are assumed.
    "sharegpt": replace(
        _ALONE,
        requests_per_s=1.0,
        first_message_tokens_p50=161.31 / 1.6487,
        first_message_sigma=1.0,
        output_tokens_p50=337.99 / 1.6487,
        output_sigma=1.0,
        max_output_tokens=8192,
    ),
    # Azure LLM inference trace 2023, conversation (Splitwise-conv): counted over its 19,366
    # requests. Shared prefixes are unknown.
    "splitwise-conv": replace(
        _ALONE,
        requests_per_s=5.53,
        first_message_tokens_p50=1020,
        first_message_sigma=0.498,
        output_tokens_p50=129,
        output_sigma=0.992,
        max_input_tokens=14_050,
        max_output_tokens=1000,
    ),
    # RaidServe, table 1: OpenThoughts-114k, served offline. One request per second is assumed.
    "openthoughts": replace(
        _ALONE,
        requests_per_s=1.0,
        first_message_tokens_p50=352,
        first_message_sigma=0.602,
        output_tokens_p50=5583,
        output_sigma=0.731,
        max_input_tokens=7633,
        max_output_tokens=37_817,
    ),
}
