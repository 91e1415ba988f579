"""Rows of what requests may ask: their clients cannot tell that an instance died."""

from typing import Any

from kvrs_testkit.scenarios import BACK, Expected, Load, Scenario, kill


def dies(name: str, rule: str, **fields: Any) -> Scenario:
    """A decode instance dies while the stream flows. The simulator has its times only."""
    return Scenario(
        name=f"request-{name}",
        rule=rule,
        faults=kill("d0", phase="decode", at_s=1.3),
        load=Load(streams=4, tokens=60, fields=fields),
        expected=Expected(lost={"d0"}, left={"d0"}, to={"d1"}),
        seeds=1,
        not_real=BACK,
    )


CHAT = [{"role": "user", "content": "play call/tokens."}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

REQUEST_ROWS = [
    dies("text", "A text is tokenised once, and continued by its ids.", prompt="hello, you"),
    dies("seed", "A sampled stream keeps its seed and its place.", temperature=0.9, seed=5),
    dies("choices", "The choices of a request have one head and one end.", n=2, seed=40),
    dies("whole", "An answer in one piece is recovered as a stream is.", stream=False),
    dies("logprobs", "Log probabilities are those of the right places.", logprobs=1),
    dies("usage", "All tokens are counted once.", stream_options={"include_usage": True}),
    dies("stop", "A stop string that spans the loss still ends the stream.", stop=["7é27", "zz"]),
    dies("chat", "A chat is rendered once, its calls are whole.", messages=CHAT, tools=TOOLS),
]
