"""Guard of an engine's hooks: an error of kvrs turns kvrs off, never the engine.

vLLM and SGLang end, with all requests, at an exception in a hook. So once kvrs is off, each hook
answers as if there were nothing to do.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Switch:
    """On/off state of an object whose hooks an engine calls. `turned_off` is called once, at the
    first error.
    """

    def __init__(self, turned_off: Callable[[], None] = lambda: None) -> None:
        self.off_reason: str | None = None
        self.turned_off = turned_off

    def turn_off(self, reason: str) -> None:
        if self.off_reason is not None:
            return
        self.off_reason = reason
        log.error("kvrs is off in this engine: %s", reason)
        try:
            self.turned_off()
        except Exception:
            log.exception("kvrs could not clear up")


def guarded(idle: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decorator for hooks of an object with a `switch`: an error turns the switch off, and
    from then on the hook returns `idle()`, which means "nothing to do".
    """

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def call(*args: P.args, **more: P.kwargs) -> R:
            switch: Switch = args[0].switch  # type: ignore[attr-defined]  # The object.
            if switch.off_reason is None:
                try:
                    return hook(*args, **more)
                except Exception as error:
                    log.exception("in %s", hook.__name__)
                    switch.turn_off(f"{hook.__name__}: {type(error).__name__}: {error}")
            answer: R = idle()
            return answer

        return call

    return decorate
