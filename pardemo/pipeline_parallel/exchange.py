"""What travels between stages: activations one way, their gradients the other. Nothing here knows autograd."""

from collections import deque

import torch
import torch.distributed as dist

#: What an activation can be made of; its place in here travels ahead of the first one.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER = 10  # numbers: kind of element, dimensions, sizes
MAX_DIMENSIONS = HEADER - 2
#: Messages that may be leaving at a time; before another, the oldest is waited for, so that its memory can go. (gloo
#: does not say whether one has left, it only waits. No schedule stands still for that: they are proven with messages
#: that block.)
LEAVING = 2


class Exchange:
    """Point-to-point messages of one rank within ``group``, which go on while it computes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Starts sending a contiguous tensor to rank ``peer`` of the group, and keeps it until it has left."""
        while len(self._sending) >= LEAVING:
            self._sending.popleft()[0].wait()
        self._sending.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))

    def receive(self, like: torch.Size, dtype: torch.dtype, peer: int) -> "Incoming":
        """Starts receiving a tensor from rank ``peer`` of the group."""
        tensor = torch.empty(like, dtype=dtype, device=self.device)
        return Incoming(dist.irecv(tensor, group=self.group, group_src=peer), tensor)

    def send_form(self, tensor: torch.Tensor, peer: int) -> None:
        """Tells what activations will look like.

        Raises:
            TypeError: elements that have no gradient, or too many dimensions.
        """
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
            raise TypeError(
                f"a stage hands on one tensor of floating-point numbers with at most {MAX_DIMENSIONS} dimensions, "
                f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        header = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        header += [0] * (HEADER - len(header))
        self.send(torch.tensor(header, device=self.device), peer)

    def receive_form(self, peer: int) -> tuple[torch.Size, torch.dtype]:
        """Waits for what :meth:`send_form` tells."""
        kind, dimensions, *sizes = self.receive(torch.Size([HEADER]), torch.int64, peer).wait().tolist()
        return torch.Size(sizes[:dimensions]), DTYPES[kind]

    def flush(self) -> None:
        """Waits until everything has left."""
        while self._sending:
            self._sending.popleft()[0].wait()


class Incoming:
    """A tensor on its way."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor):
        self._work, self._tensor = work, tensor

    def wait(self) -> torch.Tensor:
        """The tensor, as soon as it is there."""
        self._work.wait()
        return self._tensor
