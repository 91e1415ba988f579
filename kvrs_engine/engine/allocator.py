"""Memory that the C library keeps between steps."""

import ctypes
import sys

# Parameters of mallopt(3) in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_KEPT_BYTES = 1 << 30
_TOP_PAD_BYTES = 1 << 20
# The largest threshold that every glibc takes: half of the largest heap of an arena.
_MMAP_THRESHOLD_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Let glibc keep the memory that a step frees, up to 1 GB at the end of the heap; return
    whether this C library has these settings (musl and macOS have not).

    By default glibc returns the memory to the kernel, and every step pays for page faults on all of
    its temporaries. All threads use one heap, because glibc returns the heaps of further arenas
    (64 MB) whole. The process keeps at most the memory of its largest step: up to 46 MB more with
    the tiny model. Measured on 2026-11-23 (b44f08b8, two cores, six pairs of processes): prefill of
    512 tokens behind 3,584 takes 0.40 of the time, all other steps 0.97 to 1.00.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    settings = (
        (_ARENA_MAX, 1),
        (_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
        (_TRIM_THRESHOLD, _KEPT_BYTES),
        (_TOP_PAD, _TOP_PAD_BYTES),
    )
    taken = [library.mallopt(name, value) == 1 for name, value in settings]
    return all(taken)
