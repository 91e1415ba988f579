"""SGLang's request fields for replay of known output, by the logits processor of
`kvrs/sglang/replay.py`.
"""

import json
from typing import Any

# SGLang unpickles this constant. Its opcodes look up a class by its name (c), and end (.).
_PROCESSOR = json.dumps({"callable": b"ckvrs.sglang.replay\nReplayProcessor\n.".hex()})
_STORAGE = "kvrs.sglang.storage"


def take_replay(fields: dict[str, Any]) -> bool:
    """Move a call's known output into SGLang's fields for the processor; return whether the call
    had any.
    """
    known = fields.pop("vllm_xargs", None)
    if known is None:
        return False
    fields |= {"custom_logit_processor": _PROCESSOR, "custom_params": known}
    return True


def can_replay(*, takes_processors: bool, storage_options: str | None, speculates: bool) -> bool:
    """Return whether a server with these options has the processor. The scheduler imports it, and
    would end if kvrs were not installed, so the server must keep its KV in kvrs. A step of
    speculation has several tokens, which excludes replay.
    """
    return takes_processors and not speculates and _STORAGE in (storage_options or "")
