"""File descriptors of this process: their limit, and the number of connections that fit into it."""

import errno
import os
import resource

# Number of descriptors that a process has besides its connections: for libraries, listening
# sockets, logs and operators.
_ALWAYS_OPEN = 56
_FEWEST = 8


def raise_descriptor_limit() -> None:
    """Raise the soft limit on descriptors to the hard limit: the usual 1,024 is meant for
    select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return  # Kept as it is: some systems name a hard limit that no process can reach.


def descriptors_left(reserved: int) -> int:
    """Return how many connections fit into the limit on descriptors, beside `reserved`
    descriptors.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(4 * _FEWEST, limit - _ALWAYS_OPEN - reserved)


def is_exhausted(error: OSError) -> bool:
    """Return whether an error means that the process or the machine has no free descriptor."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    # A resolver without a descriptor reads no file and asks no server, so it reports an unknown
    # name: by a negative error code, or by EBUSY where it also asks by multicast (mDNS).
    is_look_up = error.errno is not None and (error.errno < 0 or error.errno == errno.EBUSY)
    return is_look_up and not _can_open()


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
