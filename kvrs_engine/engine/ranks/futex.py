"""Words in shared memory on which processes wait, and mutexes that tell of their owners' deaths.

A process that waits sleeps in the kernel: several ranks may share a core. A robust mutex is
released by the kernel before the memory of a killed process is torn down, which takes tens of
milliseconds per GB; a socket or a handle of the process tells of its end only after that.
"""

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable

from kvrs.errors import KvrsError

_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1  # Of words that processes share.
_EVERY_WAITER = (1 << 31) - 1
# A waiter looks around that often: news that is no word of its own may come between its look and
# its sleep.
_LOOK_S = 0.01
_WRAP = 1 << 32

_MUTEX_BYTES = 64  # No C library has larger ones.
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
    """Raises KvrsError: this machine has no futexes that are known here."""
    if platform.system() != "Linux" or _number is None:
        raise KvrsError(
            f"instances of several ranks run on Linux on {' and '.join(_SYSCALLS)}; this is "
            f"{platform.system()} on {platform.machine()}"
        )


class Word:
    """A counter in shared memory, written by one process and awaited by others. It wraps around."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)

    @property
    def value(self) -> int:
        return self._word.value

    def set(self, value: int) -> None:
        """Write it and wake what waits for it."""
        self._word.value = value % _WRAP
        self.wake()

    def note(self, value: int) -> None:
        """Write it for others that look at it, not for any that wait."""
        self._word.value = value % _WRAP

    def wake(self) -> None:
        """Let what waits for it look around."""
        _syscall(_number, self._address, _WAKE, _EVERY_WAITER, None, None, 0)

    def has_reached(self, value: int) -> bool:
        return (self._word.value - value) % _WRAP < _WRAP // 2

    def wait(self, value: int, look: Callable[[], None]) -> None:
        """Sleep until it has reached a value. `look` is called now and then, and may raise."""
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
        """Make it, before any process begins or awaits it."""
        attributes = ctypes.create_string_buffer(_MUTEX_BYTES)
        _demand(_library.pthread_mutexattr_init(attributes))
        _demand(_library.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _demand(_library.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _demand(_library.pthread_mutex_init(self._mutex, attributes))

    def begin(self) -> None:
        """The calling thread lives as long as its process, and the mutex with it."""
        _demand(_library.pthread_mutex_lock(self._mutex))

    def await_end(self) -> None:
        """Sleep until the process that began it has died."""
        result = _library.pthread_mutex_lock(self._mutex)
        if result == errno.EOWNERDEAD:
            _library.pthread_mutex_consistent(self._mutex)
            result = 0
        _demand(result)
        _library.pthread_mutex_unlock(self._mutex)


def _demand(result: int) -> None:
    if result:
        raise OSError(result, os.strerror(result))
