"""Several futures of one state: each is worked out in a child process that begins as a copy of this
one.
"""

import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_children(branches: Sequence[Callable[[], T]], jobs: int = 1) -> Iterator[T]:
    """What each returns, in their order, called in a process that begins with the state of this
    one, which does not change by it. At most `jobs` are at work at a time.

    Raises:
        AssertionError: one has raised it, or has ended without a word.
    """
    waiting, under_way = deque(branches), deque[tuple[int, int]]()
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            under_way.append(_begin(waiting.popleft()))
        process, answer = under_way.popleft()
        with os.fdopen(answer, "rb") as stream:
            sent = stream.read()
        _, status = os.waitpid(process, 0)
        assert sent, f"a child has ended without an answer: {os.waitstatus_to_exitcode(status)}"
        found, error = pickle.loads(sent)  # noqa: S301 - this program's own child
        if error is not None:
            raise AssertionError(error)
        yield found


def _begin(branch: Callable[[], object]) -> tuple[int, int]:
    """The child, and the descriptor that its answer is read from."""
    sys.stdout.flush()
    sys.stderr.flush()
    answer, written = os.pipe()
    if process := os.fork():
        os.close(written)
        return process, answer
    try:
        os.close(answer)
        try:
            found = pickle.dumps((branch(), None))
        except AssertionError as error:
            found = pickle.dumps((None, str(error) or repr(error)))
        with os.fdopen(written, "wb") as stream:
            stream.write(found)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)  # Nothing of the parent's is to be done twice.
