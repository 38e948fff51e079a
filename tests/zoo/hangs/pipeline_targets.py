"""The first stage sends the labels on before the activations; the last one receives the activations first.

tdrussell/diffusion-pipe#409: targets went from the first stage's data loader to the last stage by send and recv, and
both stood still. Mended: both sides take the same order.
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, layer = dist.get_rank(), torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
hidden_group = dist.new_group([0, 1])
for step in range(6):
    if rank == 0:
        hidden, gradient = layer(torch.randn(4, 16)), torch.empty(4, 16)
        dist.send(torch.zeros(4, 16), 1)  # labels
        dist.send(hidden.detach(), 1, group=hidden_group)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        received, target = torch.empty(4, 16, requires_grad=True), torch.empty(4, 16)
        if step == 0 or "--mended" in sys.argv:
            dist.recv(target, 0)
            dist.recv(received.data, 0, group=hidden_group)
        else:
            dist.recv(received.data, 0, group=hidden_group)  # activations
            dist.recv(target, 0)
        (layer(received) - target).square().mean().backward()
        dist.send(received.grad, 0)
    optimizer.step()
    optimizer.zero_grad()
