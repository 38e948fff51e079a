"""``python -m pardemo.world``: a rank that torchrun, deepspeed or accelerate has started."""

import sys

from pardemo.world.launched import main

sys.exit(main())
