"""File descriptors of this process: their limit, and how many connections fit into it."""

import errno
import os
import resource

# Descriptors of each process besides its connections: libraries, listening sockets, logs,
# operators.
_ALWAYS_OPEN = 56
_FEWEST = 8


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard limit: the usual soft limit of 1,024 is for programs that
    use select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return  # Some systems have a hard limit that no process can get.


def descriptors_left(reserved: int) -> int:
    """How many the limit leaves to connections, beside `reserved` ones."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(4 * _FEWEST, limit - _ALWAYS_OPEN - reserved)


def is_exhausted(error: OSError) -> bool:
    """The error shows that the process, or the machine, had no descriptor left."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    # Without one the resolver reads no file and asks no server: to it the name is unknown. Its
    # codes are negative; where names are also asked for by multicast (mDNS) it is EBUSY.
    is_look_up = error.errno is not None and (error.errno < 0 or error.errno == errno.EBUSY)
    return is_look_up and not _can_open()


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
