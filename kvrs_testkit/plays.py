"""Texts that scripted instances play when the prompt is `play NAME.`; in a chat when that is the
user's message.

They hold what is hard at a seam: characters of several bytes, what looks like a stop string or like
the wire's own syntax, reasoning and tool calls. In a play whose name ends with `/tokens` the
markers are tokens, in the others mere text.
"""

SCENARIOS = {
    "latin": "Où est né l'ÿ? Straße.",
    "cjk": "日本語の文字列、終。",
    "emoji": "👩‍👩‍👧 ok 🇩🇪🏳️‍🌈!",
    "mixed": "a é 漢 😀 ب\u200f z",
    "spaces": "   two   spaces \n\n tabs\t\t.",
    "wire": '"}],"token_ids":[7]}\n\ndata: [DONE]\n\n\\"',
    "stops": "one STO two STOOP three STOP four",
    "near": "abcabcabdabcabcab",
    "emojistop": "x 👩‍👩‍👦 y 👩‍👩‍👧 z",
    "empty": "",
    "thought": "<think>hm, 7 mal 8…</think>\n\nIt is 56.",
    "thought/tokens": "<think>\nué?\n</think>\n\nCinquante-six.",
    "unclosed/tokens": "<think>and on and on é",
    "almost": "<thin air> and <tool_cal you> </think>",
    "call": '<tool_call>\n{"name": "weather", "arguments": {"città": "Forlì", "n": '
    "3}}\n</tool_call>",
    "call/tokens": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kyōto '
    '京都"}}\n</tool_call>',
    "calls/tokens": '<tool_call>{"name":"a","arguments":{}}</tool_call>\n'
    '<tool_call>{"name":"b","arguments":"[1]"}</tool_call>',
    "nocall": 'so <tool_call>{"name": 3}</tool_call> then é',
    "all/tokens": "<think>é?</think>\nAh. "
    '<tool_call>{"name":"f","arguments":{"q":"é"}}</tool_call>',
}
