"""Several futures of one state: each is worked out in a child process that begins as a copy of this
one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import TypeVar

T = TypeVar("T")


def in_children(branches: Sequence[Callable[[], T]], jobs: int = 1) -> Iterator[T]:
    """Yield what each branch returns, in their order, called in a process that begins with the
    state of this one, which does not change by it. At most `jobs` are at work at a time.

    Raises:
        AssertionError: one has raised it, or has ended without an answer.
    """
    context = get_context("fork")
    waiting = deque(branches)
    under_way = deque[tuple[ForkProcess, Connection]]()
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            answer, sender = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(waiting.popleft(), sender))
            process.start()
            sender.close()
            under_way.append((process, answer))
        process, answer = under_way.popleft()
        try:
            found, violation = answer.recv()
        except EOFError:
            process.join()
            violation = f"a child has ended without an answer: {process.exitcode}"
        answer.close()
        process.join()
        assert violation is None, violation
        yield found


def _answer(branch: Callable[[], object], sender: Connection) -> None:
    try:
        sender.send((branch(), None))
    except AssertionError as error:
        sender.send((None, str(error) or repr(error)))
