"""torch's pipelining: all schedules, without and with FSDP2 around the stages; several stages on a rank."""

import torch
from common import integers, options, start, update
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

MICRO_BATCHES, STAGES, WIDTH = 4, 4, 12


class Stage(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH) if number == 0 else None
        self.norm, self.layer = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if number % 2 else None  # stages are not alike
        self.head = nn.Linear(WIDTH, 23) if number == STAGES - 1 else None

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        x = x + self.layer(self.norm(x)).tanh()
        x = x if self.scale is None else x * self.scale
        return x if self.head is None else self.head(x)


class Part(nn.ModuleDict):
    """Stages of the model that are a stage of the pipeline, under the names that they have in the whole model."""

    def forward(self, x):
        for stage in self.values():
            x = stage(x)
        return x


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


args = options(pp=1, schedule="GPipe", data="none")  # data: none, or fully_shard around each stage
world = start()[0]
torch.manual_seed(0)
model = Part({str(number): Stage(number) for number in range(STAGES)})
for parameter in model.parameters():
    nn.init.normal_(parameter, std=0.3)  # no two are alike
pp, ranks = args.pp, world // args.pp
mesh = init_device_mesh("cpu", (ranks, pp), mesh_dim_names=("data", "pipeline"))
rank, place = mesh["data"].get_local_rank(), mesh["pipeline"].get_local_rank()
if pp > 1:
    kind = getattr(schedules, f"Schedule{args.schedule}")
    single, v_shaped = args.schedule in ("GPipe", "1F1B"), args.schedule in ("ZBVZeroBubble", "DualPipeV")
    numbers = range(place, STAGES, pp) if not v_shaped else (place, STAGES - 1 - place)
    parts = [Part({str(number): model[str(number)]}) for number in numbers]
    if single:  # one stage has two parts of the model
        first = place * STAGES // pp
        numbers, parts = [place], [Part({str(n): model[str(n)] for n in range(first, first + STAGES // pp)})]
    count = pp if single else STAGES
    if args.data != "none":
        parts = [fully_shard(p, mesh=mesh["data"]) for p in parts]
    stages = [
        PipelineStage(p, n, count, torch.device("cpu"), group=mesh["pipeline"].get_group())
        for n, p in zip(numbers, parts, strict=True)
    ]
    schedule = kind(stages[0] if single else stages, MICRO_BATCHES, loss_fn=loss_of)
held = parts if pp > 1 else [model]
optimizer = torch.optim.AdamW([p for part in held for p in part.parameters()], lr=0.01)
for step in range(3):
    tokens = integers(step, 23, 16, 9).chunk(ranks)[rank]
    if pp > 1:
        inputs = (tokens[:, :-1],) if 0 in numbers else ()
        schedule.step(*inputs, **({"target": tokens[:, 1:]} if count - 1 in numbers else {}))
    else:
        for part in tokens.chunk(MICRO_BATCHES):
            (loss_of(model(part[:, :-1]), part[:, 1:]) / MICRO_BATCHES).backward()
    update(model, optimizer)
