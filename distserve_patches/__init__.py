"""What kvrs adds to DistServe, applied at import; none of its code is copied."""

from distserve_patches.upstream import load_in_worker

# What Ray unpickles in a worker process names classes of this package, whose bases are upstream's.
load_in_worker()
