"""Replay: a logits processor of vLLM that makes a request generate known tokens again.

    vllm serve MODEL --logits-processors kvrs.vllm.replay:Replay

A cut stream's request is sent again unchanged, with its output so far in `vllm_xargs`. vLLM
generates these tokens again, one per step, which restores its grammar, penalties, `min_tokens`,
random generator and parsers of tools and reasoning.

An error never ends the engine: the processor turns itself off, and the proxy notices the differing
tokens.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)

from kvrs.protocol.instance import REPLAY_KEY

# Most known tokens of a request, more than any context has: a longer list is decoded before it can
# be refused.
_MAX_TOKENS = 1 << 20
_MAX_ID = 1 << 31

logger = init_logger(__name__)


class Replay(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed beside kvrs.
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check that the known tokens are a list of ids. Raises ValueError, which the client gets
        as HTTP 400.
        """
        known = (sampling_params.extra_args or {}).get(REPLAY_KEY)
        if known is None:
            return
        if not isinstance(known, list) or len(known) > _MAX_TOKENS:
            raise ValueError(f"{REPLAY_KEY} must be a list of at most {_MAX_TOKENS} token ids")
        for each in known:
            if type(each) is not int or not 0 <= each < _MAX_ID:
                raise ValueError(f"{REPLAY_KEY} must hold token ids, got {str(each)[:40]!r}")

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        # By index in the batch: the tokens that a request is to repeat, and vLLM's list of its
        # output so far.
        self._known: dict[int, tuple[list[int], list[int]]] = {}
        self._is_off = False

    def is_argmax_invariant(self) -> bool:
        # Greedy requests are changed too, so vLLM must not skip the processor for them.
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None or self._is_off:
            return
        try:
            process_dict_updates(self._known, batch_update, _added)
        except Exception as error:
            self._turn_off(error)

    def apply(self, logits: Any) -> Any:
        """Forbid all tokens but the next known one, in each row of the logits whose request repeats
        tokens.
        """
        if not self._known:
            return logits
        try:
            vocabulary = logits.shape[-1]
            rows, tokens = [], []
            for row, (known, output) in self._known.items():
                at = len(output)
                if at < len(known) and known[at] < vocabulary:
                    rows.append(row)
                    tokens.append(known[at])
            if rows:
                logits[rows] = float("-inf")
                logits[rows, tokens] = 0.0
        except Exception as error:
            self._turn_off(error)
        return logits

    def _turn_off(self, error: Exception) -> None:
        self._is_off = True
        self._known.clear()
        logger.error("kvrs: replay is off from now on: %r", error)


def _added(
    params: SamplingParams, _: list[int] | None, output: list[int]
) -> tuple[list[int], list[int]] | None:
    known = (params.extra_args or {}).get(REPLAY_KEY)
    return (known, output) if known and len(output) < len(known) else None
