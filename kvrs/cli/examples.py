"""Examples below the help of each command."""

_EXAMPLES = {
    "demo": ["kvrs demo --policy rom --requests 100"],
    "up": [
        "kvrs up --nodes 3",
        "kvrs up --config kvrs.yaml --proxies 2",
        "kvrs up --pipelines 2 --pp 2",
    ],
    "proxy": [
        "kvrs proxy --prefill http://a:8100 --decode http://b:8200 --decode http://c:8200",
        "kvrs proxy --config vllm.yaml",
    ],
    "agent": ["KVRS_SECRET=... kvrs agent --config kvrs.yaml --node n0"],
    "replay": [
        "kvrs replay --url http://127.0.0.1:8000 --trace-preset mooncake-conversation",
        "kvrs replay --url http://127.0.0.1:8000 --trace conversation_trace.jsonl --window 0:500 "
        "--rate 10 --oracle",
    ],
    "simulate": ["kvrs simulate --config kvrs.yaml --deaths 3 --seeds 20"],
    "compare": [
        "kvrs compare --policies auto,rom,always_recompute --deaths 3 --seeds 20",
        "kvrs compare --policies auto,rom --trace conversation_trace.jsonl --fault faults.yaml",
    ],
    "tune": [
        "kvrs tune --space space.yaml --goal recovery_p99 --deaths 3 --jobs 2",
        "kvrs tune --space space.yaml --goal goodput --trace conversation_trace.jsonl",
    ],
    "report": ["kvrs report out/replay --out page", "kvrs report out/auto out/rom --out page"],
    "explain": [
        "kvrs explain --profile opt-13b-a100-kvrs-seed --prompt-tokens 1477 --bandwidth 25Gbit/s",
        "kvrs explain --log events.jsonl",
        "kvrs explain --elastic llama-3.1-70b-h100-vllm-tp8 --tp 8 --lost 1 --backup host",
        "kvrs explain --profile llama-3.1-70b-a100-vllm-tp4 --draft llama-3.1-8b-a100-vllm-tp1",
    ],
    "incidents": [
        "kvrs incidents events.jsonl",
        "kvrs incidents events.jsonl 3 --what-if always_recompute",
    ],
    "top": ["kvrs top --config kvrs.yaml", "kvrs top --url http://127.0.0.1:8001 --once --json"],
    "doctor": ["kvrs doctor --config kvrs.yaml", "kvrs doctor --json"],
    "docs": ["kvrs docs vllm", "kvrs docs | less"],
    "key": ["kvrs key team-a"],
    "profile": [
        "kvrs profile --url http://127.0.0.1:8100 --out table.json",
        "kvrs profile --out table.json --model /models/Llama-3.2-1B",
    ],
    "alerts": ["kvrs alerts > /etc/prometheus/kvrs.yaml"],
    "dashboard": ["kvrs dashboard > kvrs.json"],
    "config check": ["kvrs config check kvrs.yaml"],
    "config show": ["KVRS_PROXY__PORT=8080 kvrs config show kvrs.yaml"],
    "config diff": ["kvrs config diff kvrs.yaml new.yaml"],
    "config init": ["kvrs config init vllm.yaml --for vllm"],
    "config schema": ["kvrs config schema > kvrs.schema.json"],
}


def examples(command: str) -> str | None:
    """Those of a command, a paragraph each; None: it has none."""
    lines = _EXAMPLES.get(command)
    return None if lines is None else "\n\n".join(["Examples:", *lines])
