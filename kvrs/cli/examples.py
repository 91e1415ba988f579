"""Examples below the help of each command."""

from collections.abc import Mapping, Sequence

_EXAMPLES = {
    "proxy": [
        "kvrs proxy --prefill http://a:8100 --decode http://b:8200 --decode http://c:8200",
        "kvrs proxy --config vllm.yaml",
    ],
    "agent": ["KVRS_SECRET=... kvrs agent --config kvrs.yaml --node n0"],
    "accept": ["kvrs accept d0", "kvrs accept d0 --admin-url http://127.0.0.1:8001"],
    "incidents": [
        "kvrs incidents events.jsonl",
        "kvrs incidents events.jsonl d0 --since '2026-11-30 03:57'",
        "kvrs incidents events.jsonl --json | jq '.incidents[].sentence'",
    ],
    "top": [
        "kvrs top --config kvrs.yaml",
        "kvrs top --admin-url http://127.0.0.1:8001 --once",
    ],
    "doctor": ["kvrs doctor --config kvrs.yaml", "kvrs doctor --json"],
    "docs": ["kvrs docs vllm", "kvrs docs | less"],
    "key": ["kvrs key team-a"],
    "profile": [
        "kvrs profile --url http://127.0.0.1:8100 --out table.json",
        "kvrs profile --out table.json --model /models/Llama-3.2-1B",
    ],
    "config check": ["kvrs config check kvrs.yaml"],
    "config show": ["KVRS_PROXY__PORT=8080 kvrs config show kvrs.yaml"],
    "config init": ["kvrs config init vllm.yaml --for vllm"],
    "config schema": ["kvrs config schema > kvrs.schema.json"],
}


def examples(command: str, known: Mapping[str, Sequence[str]] = _EXAMPLES) -> str | None:
    """Return the examples of a command, one paragraph each; None: the command has none."""
    lines = known.get(command)
    return None if lines is None else "\n\n".join(["Examples:", *lines])
