"""A program run by another user, for tests that root runs: its modules are imported before, since
that user may not be able to read them.

`python -m kvrs_testkit.as_user UID GROUPS MODULE ARGUMENT...`: the first of the groups is the
user's own, such as `12001,12000`.
"""

import encodings.idna  # noqa: F401 - it is looked for at the first name of a host.
import os
import sys
from importlib import import_module


def main() -> int:
    _, uid, listed, name, *arguments = sys.argv
    module = import_module(name)
    groups = [int(group) for group in listed.split(",")]
    os.setgroups(groups)
    os.setresgid(groups[0], groups[0], groups[0])
    os.setresuid(int(uid), int(uid), int(uid))
    os.umask(0o077)  # No test passes by what a mode happens to leave open.
    sys.argv = [name, *arguments]
    status: int | None = module.main()
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
