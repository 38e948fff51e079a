"""``python -m pardemo.finetune RECIPE``: what torchrun, deepspeed and accelerate launch."""

import sys

from pardemo.finetune.commands import main

sys.exit(main())
