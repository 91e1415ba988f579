"""The same as `python -m experiments.field_requests.run`."""

import sys

from experiments.field_requests.run import main

sys.exit(main())
