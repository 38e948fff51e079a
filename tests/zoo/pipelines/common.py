"""What these scripts share: options, and a model that is cut into stages."""

import argparse

import torch.distributed as dist
from torch import nn
from torch.nn import functional

LAYERS = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + functional.gelu(self.fc(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.head = nn.Linear(16, 8)

    def cut(self, stage, stages):
        """Leaves the layers of one stage, and the head in the last one."""
        for i in range(LAYERS):
            if i * stages // LAYERS != stage:
                del self.layers[str(i)]
        if stage + 1 < stages:
            self.head = nn.Identity()

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def arguments(samples):
    """The options; the process group is there then."""
    parser = argparse.ArgumentParser()
    for name, default in (("batch", samples), ("accumulate", 1), ("pp", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mended", action="store_true")
    dist.init_process_group("gloo")
    return parser.parse_args()
