"""Accelerate's save_state, load_state and skip_first_batches, as its documentation does it."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from common import GLOBAL, SAMPLES, STEPS, build, data, options
from torch import nn
from torch.utils.data import DataLoader

parser = options()
parser.add_argument("--seedable", action="store_true", help="an order of samples that a seed and the epoch make")
parser.add_argument("--generator-back", action="store_true", help="put it back behind the first batch that is loaded")
given = parser.parse_args()
accelerator = Accelerator(
    project_config=ProjectConfiguration(str(given.out), automatic_checkpoint_naming=True),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=given.seedable),
    cpu=True,
)


class Progress:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


set_seed(7)
ranks = accelerator.num_processes
loader = DataLoader(data(), GLOBAL // ranks, shuffle=True)
model, progress = build(), Progress()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
accelerator.register_for_checkpointing(progress)
generator = None
if list(given.out.glob("checkpoints/checkpoint_*")):
    accelerator.load_state()
    generator = torch.get_rng_state() if given.generator_back else None
    saved = len(list(given.out.glob("checkpoints/checkpoint_*")))
    accelerator.project_configuration.iteration = saved
per_epoch = SAMPLES // GLOBAL
first = progress.step // per_epoch
for epoch in range(first, 10):
    loader.set_epoch(epoch)
    skipped = progress.step % per_epoch if epoch == first else 0
    for x, y in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        if generator is not None:
            torch.set_rng_state(generator)
            generator = None
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % given.every == 0:
            accelerator.save_state()
        if progress.step == STEPS:
            raise SystemExit
