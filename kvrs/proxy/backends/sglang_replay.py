"""SGLang's fields for output that it is to generate again, by the logits processor of
`kvrs/sglang/replay.py`.
"""

import json
from typing import Any

# SGLang unpickles what it gets here. This one is constant: the opcodes that look a class up by its
# name (c), and end (.).
_PROCESSOR = json.dumps({"callable": b"ckvrs.sglang.replay\nReplayProcessor\n.".hex()})
_STORAGE = "kvrs.sglang.storage"


def take_replay(fields: dict[str, Any]) -> bool:
    """Put the known output, where a call has any, into SGLang's own fields; True: it has."""
    known = fields.pop("vllm_xargs", None)
    if known is None:
        return False
    fields |= {"custom_logit_processor": _PROCESSOR, "custom_params": known}
    return True


def can_replay(*, takes_processors: bool, storage_options: str | None, speculates: bool) -> bool:
    """A server with these flags has the processor. It is looked up in the scheduler, which would
    end without kvrs: that kvrs is there is known only where it keeps KV. A step of speculation has
    several tokens.
    """
    return takes_processors and not speculates and _STORAGE in (storage_options or "")
