"""``python -m tests.soak``: draws cases, runs them on warm Worlds, sums up; status 1 when anything failed."""

import sys

from .run import main

sys.exit(main())
