"""Files that only this process's user may read."""

import os


def fault_of_mode(status: os.stat_result, user: int) -> str | None:
    """Return the reason why a file is not private to a user (a numeric id); None: it is private.

    The group may read a file of root, if the user is not root: a Kubernetes secret has the pod's
    `fsGroup`.
    """
    allowed = 0o640 if status.st_uid == 0 and user != 0 else 0o600
    if others := status.st_mode & 0o077 & ~allowed:
        return f"other users may use it (mode bits {others:03o}); allowed: {allowed:04o}"
    return None
