"""A backward pass in two parts: the gradient of a stage's input now, those of its weights whenever there is time.

The way of ``stage_backward_input`` and ``stage_backward_weight`` in ``torch.distributed.pipelining``. The graph's nodes
from which the input can be reached are its trunk; where a weight joins it (a matrix multiplication, a norm), the first
part notes what gradient arrived, and the second one starts there, with that gradient, towards the weight alone. Nothing
is computed twice, and any module will do. (Calling ``autograd.grad`` twice from the output would go down the trunk
twice; putting off the gradients of ``nn.Linear`` alone, as the paper's code does, would change the modules.)

A linear layer y = x · w in the middle of a stage (x [b, s, h], w [h, o])::

    first part     dy [b, s, o] arrives --> dx = dy · wᵀ [b, s, h] --> on towards the stage's input, and sent
                      | noted
    second part       +--------------------> dw = xᵀ · dy [h, o]       whenever there is time

What it costs: all that autograd kept of the forward stays until the second part, and so do the gradients noted. A stage
whose input needs no gradient, the model's first, does everything in the second part.

Written anew for three cases that torch's does not cover (in 2.13): outputs that have been let go of already, weights
used in several places of a stage, and outputs that do not depend on the input. Hooks on parameters run once; a hook on
a tensor where a weight joins the trunk runs in both parts, and counts once. DDP and ZeRO would see an end of backward
for each part: use whole backward passes there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

Noted = tuple[torch.Tensor | None, ...]


class SplitBackward:
    """Computes the gradients of ``xs``, into their ``.grad``, and keeps what :meth:`weights` needs.

    Args:
        edges: of the outputs.
        gradients: of the same, None for a loss.
        xs: the inputs, leaves of the graph.
    """

    def __init__(
        self, edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor | None], xs: Sequence[torch.Tensor]
    ):
        xs = [x for x in xs if x.requires_grad]
        self._noted: dict[Node, Noted] = {}
        self._groups = _groups(edges, gradients, {get_gradient_edge(x).node for x in xs})
        if not xs or not edges:
            return
        joints = [node for group in self._groups for node in group.joints]
        handles = [node.register_prehook(self._note(node)) for node in joints]
        try:
            gradients_of_inputs = torch.autograd.grad(
                edges, xs, gradients, retain_graph=bool(self._groups), allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        for x, gradient in zip(xs, gradients_of_inputs, strict=True):
            x.grad = gradient

    def weights(self) -> None:
        """Adds the weights' gradients to their ``.grad``; once."""
        while self._groups:
            self._groups.pop().run(self._noted)
        self._noted = {}

    def _note(self, node: Node):
        def hook(gradients: Noted) -> None:
            self._noted[node] = gradients

        return hook


@dataclass(frozen=True)
class _Group:
    """Weights that share a place where they join the trunk, and all places where they do."""

    leaves: frozenset[Node]  # the weights, as the nodes that accumulate their gradients
    joints: list[Node]  # nodes of the trunk at which they join it
    loose: list[tuple]  # edges of outputs that do not depend on the input, and their gradients

    def run(self, noted: dict[Node, Noted]) -> None:
        starts, handles = list(self.loose), list[RemovableHandle]()
        for node in (node for node in self.joints if node in noted):
            gradients = noted[node]
            starts += [(GradientEdge(node, nr), g) for nr, g in enumerate(gradients) if g is not None]
            # what comes to it from another joint, or a hook on it changes again, is in there already
            handles.append(node.register_prehook(lambda _, gradients=gradients: gradients))
        try:
            if starts:
                edges, gradients = zip(*starts, strict=True)
                weights = [leaf.variable for leaf in self.leaves]  # type: ignore[attr-defined]
                # kept for another group, whose joint may lie between two of this one's
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=weights)
        finally:
            for handle in handles:
                handle.remove()


def _groups(edges: Sequence[GradientEdge], gradients: Sequence, inputs: set[Node]) -> list[_Group]:
    trunk: set[Node] = set()
    leaves: dict[Node, frozenset[Node]] = {}  # of what is off the trunk: the weights behind it
    groups: list[_Group] = []
    for node in _from_the_leaves(edges):
        behind = [child for child, _ in node.next_functions if child is not None]
        below: frozenset[Node] = frozenset().union(*(leaves[child] for child in behind if child not in trunk))
        if node in inputs or any(child in trunk for child in behind):
            trunk.add(node)
            groups = _with(groups, _Group(below, [node], []))
        else:
            leaves[node] = frozenset([node]) if type(node).__name__ == "AccumulateGrad" else below
    for edge, gradient in zip(edges, gradients, strict=True):
        if edge.node not in trunk:
            groups = _with(groups, _Group(leaves[edge.node], [], [(edge, gradient)]))
    return groups


def _with(groups: list[_Group], added: _Group) -> list[_Group]:
    if not added.leaves:
        return groups
    for group in groups:
        if group.leaves & added.leaves:
            added = _Group(group.leaves | added.leaves, group.joints + added.joints, group.loose + added.loose)
    return [group for group in groups if not group.leaves & added.leaves] + [added]


def _from_the_leaves(edges: Sequence[GradientEdge]) -> list[Node]:
    """All nodes of the graph, each after those that its gradient goes to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(edge.node, False) for edge in edges]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
