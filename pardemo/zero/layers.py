"""Which modules stage 3 gathers at a time."""

from collections.abc import Sequence

from torch import nn


def default_layers(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ``ModuleList`` and ``Sequential`` in ``module`` that have parameters."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [layer for layer in module if next(layer.parameters(), None) is not None]
    return [layer for child in module.children() for layer in default_layers(child)]


def check_layers(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """ValueError where a layer is no part of ``module``, or a part of another layer."""
    names = {part: name for name, part in module.named_modules()}
    for number, layer in enumerate(layers):
        if not names.get(layer):
            raise ValueError(f"layers[{number}] is {'the whole' if layer is module else 'no part of the'} module")
        inside = next((other for other in layers if other is not layer and other in set(layer.modules())), None)
        if inside is not None or layer in layers[:number]:
            raise ValueError(f"layers overlap: {names[inside or layer]} is in {names[layer]}, which is listed as well")


def parameters_by_owner(module: nn.Module, layers: Sequence[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Each layer's own parameters; those in no layer, or in several (tied), are the whole module's, the last entry."""
    used = [set(layer.parameters()) for layer in layers]
    shared = {p for number, own in enumerate(used) for other in used[number + 1 :] for p in own & other}
    taken = set().union(*used) - shared
    owners = {layer: [p for p in layer.parameters() if p not in shared] for layer in layers}
    owners[module] = [p for p in module.parameters() if p not in taken]
    return owners
