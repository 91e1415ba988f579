"""Words in shared memory on which processes wait, and robust mutexes that report the death of their
owner.

A waiting process sleeps in the kernel, because several ranks may share a core. The kernel releases
a robust mutex before it frees the memory of a killed process, which takes tens of milliseconds per
GB; a socket or a process handle reports the end only after that.
"""

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable

from kvrs.errors import KvrsError

_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1  # Operations on words that processes share.
_EVERY_WAITER = (1 << 31) - 1
# Interval at which a waiter calls `look`: an event without a wake-up may come before its sleep.
_LOOK_S = 0.01
_WRAP = 1 << 32

_MUTEX_BYTES = 64  # An upper bound over C libraries.
_ROBUST, _PROCESS_SHARED = 1, 1

_library = ctypes.CDLL(None, use_errno=True)
_number = _SYSCALLS.get(platform.machine())
_syscall = _library.syscall
_syscall.argtypes = [
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LOOK = _Timespec(0, int(_LOOK_S * 1e9))


def check_futexes() -> None:
    """Raises KvrsError if the futexes of this machine are not supported."""
    if platform.system() != "Linux" or _number is None:
        raise KvrsError(
            f"instances of several ranks run on Linux on {' and '.join(_SYSCALLS)}; this is "
            f"{platform.system()} on {platform.machine()}"
        )


class Word:
    """A counter in shared memory that one process writes and others await; its value wraps
    around.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    @property
    def value(self) -> int:
        return self._word.value

    def set(self, value: int) -> None:
        """Write the value and wake all waiters."""
        self._word.value = value % _WRAP
        self.wake()

    def note(self, value: int) -> None:
        """Write the value without waking waiters."""
        self._word.value = value % _WRAP

    def wake(self) -> None:
        """Wake all waiters, which then call their `look`."""
        _syscall(_number, self._address, _WAKE, _EVERY_WAITER, None, None, 0)

    def has_reached(self, value: int) -> bool:
        return (self._word.value - value) % _WRAP < _WRAP // 2

    def wait(self, value: int, look: Callable[[], None]) -> None:
        """Sleep until the counter has reached a value; `look` is called regularly, and may
        raise.
        """
        while (self._word.value - value) % _WRAP >= _WRAP // 2:
            seen = self._word.value
            if (seen - value) % _WRAP < _WRAP // 2:
                return
            _syscall(_number, self._address, _WAIT, seen, ctypes.byref(_LOOK), None, 0)
            if not self.has_reached(value):
                look()


class Life:
    """A mutex that a process holds as long as it lives."""

    BYTES = _MUTEX_BYTES

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._mutex = (ctypes.c_char * _MUTEX_BYTES).from_buffer(memory, offset)

    def prepare(self) -> None:
        """Initialise the mutex, before any process uses it."""
        attributes = ctypes.create_string_buffer(_MUTEX_BYTES)
        _demand(_library.pthread_mutexattr_init(attributes))
        _demand(_library.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _demand(_library.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _demand(_library.pthread_mutex_init(self._mutex, attributes))

    def begin(self) -> None:
        """Lock the mutex for the life of the calling thread, which must be that of its process."""
        _demand(_library.pthread_mutex_lock(self._mutex))

    def await_end(self) -> None:
        """Sleep until the process that holds the mutex has died."""
        result = _library.pthread_mutex_lock(self._mutex)
        if result == errno.EOWNERDEAD:
            _library.pthread_mutex_consistent(self._mutex)
            result = 0
        _demand(result)
        _library.pthread_mutex_unlock(self._mutex)


def _demand(result: int) -> None:
    if result:
        raise OSError(result, os.strerror(result))
