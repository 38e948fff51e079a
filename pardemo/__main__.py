import sys

from pardemo.cli import main

sys.exit(main())
