"""Streams of scripted engines, whose tokens are known beforehand."""

import json

from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted_model import expected_ids, text_of


def expected_text(prompt: list[int], tokens: int) -> str:
    return "".join(map(text_of, expected_ids(prompt, tokens)))


async def is_whole(system: ProxyCluster, prompt: list[int], tokens: int) -> bool:
    """True if a greedy completion comes with every token, and each once."""
    status, body = await system.complete(prompt=prompt, max_tokens=tokens, temperature=0)
    if status != 200:
        return False
    return bool(json.loads(body)["choices"][0]["text"] == expected_text(prompt, tokens))
