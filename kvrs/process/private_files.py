"""Files that only this process's user may read."""

import os


def fault_of_mode(status: os.stat_result, user: int) -> str | None:
    """Why a file is not private to this user (a numeric id); None: it is.

    The group may read a file that belongs to root, if the user is another one: so does a pod read
    a secret of Kubernetes, which has the pod's `fsGroup`.
    """
    allowed = 0o640 if status.st_uid == 0 and user != 0 else 0o600
    if others := status.st_mode & 0o077 & ~allowed:
        return f"other users may use it (mode bits {others:03o}); allowed: {allowed:04o}"
    return None
