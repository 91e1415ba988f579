"""Replay: a logits processor of SGLang that makes a request generate known tokens again.

A cut stream's request is sent again unchanged, with its output so far in `custom_params`. SGLang
generates these tokens again, one per step, first at prefill and then at decode, which restores its
penalties, grammar and `min_tokens`.

SGLang, started with `--enable-custom-logit-processor`, imports the class by the name that
`kvrs/proxy/backends/sglang_replay.py` sends. An error never ends the scheduler: the proxy notices
the differing tokens.
"""

import logging
from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from kvrs.protocol.instance import REPLAY_KEY

log = logging.getLogger(__name__)

_REQUEST = "__req__"  # Key under which SGLang puts the request itself among a request's parameters.
# Key among a request's parameters under which this processor keeps its state from step to step.
_PLACE = "kvrs_place"


class ReplayProcessor(CustomLogitProcessor):  # type: ignore[misc]  # SGLang is not checked.
    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        """Forbid all tokens but the next known one, in each row of the logits whose request repeats
        tokens.
        """
        try:
            for row, parameters in enumerate(custom_param_list or ()):
                known, at = parameters[REPLAY_KEY], _position(parameters)
                if at < len(known) and 0 <= known[at] < logits.shape[-1]:
                    logits[row] = float("-inf")
                    logits[row, known[at]] = 0.0
        except Exception as error:
            log.error("kvrs: output is not replayed: %r", error)
        return logits


def _position(parameters: dict[str, Any]) -> int:
    """Return the index in the output of the token that the request generates next.

    With overlap scheduling SGLang appends a token to the output one step late. Its count of decode
    steps is up to date, and starts at 0 at every prefill, also after a retraction.
    """
    request = parameters[_REQUEST]
    steps, output = request.decode_batch_idx, len(request.output_ids)
    last, begun = parameters.get(_PLACE, (steps, 0))
    # The count did not rise: the request has begun, by a prefill or with transferred KV.
    if steps <= last:
        begun = output - steps
    parameters[_PLACE] = steps, begun
    return int(begun + steps)
