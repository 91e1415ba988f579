"""How a task ended."""

import asyncio


def error_of(task: asyncio.Task[None]) -> BaseException | None:
    """The error that ended it; None: it was cancelled, or came to its end.

    To ask releases what a cancelled task keeps with its error: the frames of its last moment. They
    hold the stream and, by a timeout, the task itself, a cycle with a whole prompt in it.
    """
    try:
        return task.exception()
    except asyncio.CancelledError:
        return None
