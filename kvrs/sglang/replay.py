"""Replay: a logits processor of SGLang that has a request generate tokens that are known already.

A stream that was cut is sent again as it was, with its output so far in `custom_params`. These
tokens are generated once more, one a step: prefill's token, and then decode's, so that SGLang's
penalties, grammar, and `min_tokens` are where they were when it was cut.

SGLang looks the class up by its name, which `kvrs/proxy/backends/sglang_replay.py` sends, in
servers with `--enable-custom-logit-processor`. An error here never ends the scheduler: other tokens
come than those that are known, and the proxy sees it.
"""

import logging
from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from kvrs.protocol.instance import REPLAY_KEY

log = logging.getLogger(__name__)

_REQUEST = "__req__"  # SGLang's own key of a request in its parameters.
_PLACE = "kvrs_place"  # Of what is kept here between two steps of a request.


class ReplayProcessor(CustomLogitProcessor):  # type: ignore[misc]  # SGLang is not checked.
    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        """Leave one token in the rows of requests whose next token is known."""
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
    """The position of the next token in the output.

    With overlap scheduling SGLang appends a token to the output one step later. What it counts in
    time are steps of decode, from 0 at a prefill, also at that behind a retraction.
    """
    request = parameters[_REQUEST]
    steps, output = request.decode_batch_idx, len(request.output_ids)
    last, begun = parameters.get(_PLACE, (steps, 0))
    if steps <= last:  # It begins here: by a prefill, or with KV that was brought.
        begun = output - steps
    parameters[_PLACE] = steps, begun
    return int(begun + steps)
