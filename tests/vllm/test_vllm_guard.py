"""Errors of hooks in vLLM."""

from kvrs.engines.guard import Switch, guarded


class Hooks:
    def __init__(self) -> None:
        self.cleared = 0
        self.switch = Switch(self.clear)
        self.calls = 0

    def clear(self) -> None:
        self.cleared += 1
        raise RuntimeError("in clearing up")

    @guarded(lambda: (0, False))
    def hook(self, value: int) -> tuple[int, bool]:
        self.calls += 1
        return 10 // value, True


def test_an_error_turns_kvrs_off_and_nothing_else() -> None:
    hooks = Hooks()
    assert hooks.hook(2) == (5, True)
    assert hooks.hook(0) == (0, False)
    assert hooks.switch.off_reason == "hook: ZeroDivisionError: integer division or modulo by zero"
    assert hooks.hook(2) == (0, False)
    assert (hooks.calls, hooks.cleared) == (2, 1)
