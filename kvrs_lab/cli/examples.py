"""Examples below the help of each command of the laboratory."""

EXAMPLES = {
    "demo": ["kvrs lab demo --policy rom --requests 100"],
    "up": [
        "kvrs lab up --nodes 3",
        "kvrs lab up --config kvrs.yaml --proxies 2",
        "kvrs lab up --pipelines 2 --pp 2",
    ],
    "replay": [
        "kvrs lab replay --url http://127.0.0.1:8000 --trace-preset mooncake-conversation",
        "kvrs lab replay --url http://127.0.0.1:8000 --trace conversation_trace.jsonl "
        "--requests 500 --rate 10 --oracle",
    ],
    "simulate": ["kvrs lab simulate --config kvrs.yaml --deaths 3 --seeds 20"],
    "compare": [
        "kvrs lab compare --policies auto,rom,always_recompute --deaths 3 --seeds 20",
        "kvrs lab compare --policies auto,rom --trace conversation_trace.jsonl --fault faults.yaml",
    ],
    "tune": [
        "kvrs lab tune --space space.yaml --goal recovery_p99 --deaths 3 --jobs 2",
        "kvrs lab tune --space space.yaml --goal goodput --trace conversation_trace.jsonl",
    ],
    "report": [
        "kvrs lab report out/replay",
        "kvrs lab report out/auto out/rom",
    ],
    "explain": [
        "kvrs lab explain --profile opt-13b-a100-kvrs-seed --prompt-tokens 1477 "
        "--bandwidth 25Gbit/s",
        "kvrs lab explain --replay events.jsonl --set policy.name=always_recompute",
    ],
}
