"""Additions of kvrs to DistServe, applied at import; none of its code is copied."""

from distserve_patches.upstream import load_in_worker

# Ray unpickles classes of this package in a worker process; their bases are upstream's.
load_in_worker()
