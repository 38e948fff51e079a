"""``python -m pardemo.finetune RECIPE``: what torchrun, deepspeed and accelerate launch."""

import sys

from pardemo.finetune.training.launch import main

sys.exit(main())
