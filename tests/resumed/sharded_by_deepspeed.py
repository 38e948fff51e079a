"""DeepSpeed's ZeRO, by save_checkpoint and load_checkpoint; on other ranks through a universal checkpoint.

Loader and scheduler are DeepSpeed's own. Its documentation has a run that goes on draw the loader to its step.
Generators are no part of what is saved there; ``--generators`` saves those of all ranks in ``client_state``.
"""

import subprocess
import sys

import deepspeed
import torch
import torch.distributed as dist
from common import GLOBAL, STEPS, build, data, options
from deepspeed.utils import RepeatingLoader
from torch import nn

parser = options()
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--universal", action="store_true")
parser.add_argument("--generators", action="store_true")
given = parser.parse_args()
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
latest = given.out / "latest"
universal = given.universal and latest.exists()
if universal and rank == 0:
    tag = latest.read_text().strip()
    words = ["--input_folder", str(given.out / tag), "--output_folder", str(given.out / "universal"),
             "--inject_missing_state"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words], check=True)
    (given.out / "latest_universal").write_text("universal")
    latest.write_text("universal")
dist.barrier()
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
settings = {
    "train_micro_batch_size_per_gpu": GLOBAL // ranks,
    "communication_data_type": "fp32",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": given.stage, "stage3_param_persistence_threshold": 0},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "total_num_steps": 20},
    },
    "checkpoint": {"load_universal": universal},
}
engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, training_data=data(), config=settings)
loader = RepeatingLoader(loader)
torch.manual_seed(3 + rank)
begun = 0
if latest.exists():
    path, client = engine.load_checkpoint(str(given.out))
    begun = client["step"]
    for _ in range(begun):
        next(loader)
    if given.generators:  # behind the loader, which draws too; on other ranks each is seeded anew
        if len(client["generators"]) == ranks:
            torch.set_rng_state(client["generators"][rank])
        else:
            torch.manual_seed(1000 * begun + rank)
for step in range(begun, STEPS):
    x, y = next(loader)
    engine.backward(nn.functional.cross_entropy(engine(x), y))
    engine.step()
    if (step + 1) % given.every == 0:
        state = {"step": step + 1}
        if given.generators:  # of all ranks, since ZeRO-1 and 2 write this of one rank alone
            state["generators"] = [None] * ranks
            dist.all_gather_object(state["generators"], torch.get_rng_state())
        engine.save_checkpoint(str(given.out), f"step{step + 1}", client_state=state)
