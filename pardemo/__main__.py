"""``python -m pardemo``: the command line."""

import sys

from pardemo.cli import main

sys.exit(main())
