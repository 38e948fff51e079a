"""The kinds of scene, a module for each group; a group's module is imported when it is asked for.

A new kind is a function under ``@scene`` in one of the modules; a new group is a module, a name here, and a share in
:mod:`pardemo.soak.schedule`.
"""

from importlib import import_module

from pardemo.soak.scene import Kind, kinds_of

GROUPS = ("world", "ranks", "layouts", "cluster", "checkpoints", "runner", "finetune", "measure")


def kinds(group: str) -> dict[str, Kind]:
    """The kinds of a group by name. Loads torch; for ``finetune`` Transformers, too.

    Raises:
        ModuleNotFoundError: the group needs an extra that is not installed. ValueError: there is no such group.
    """
    if group in ("ranks", "layouts"):
        from pardemo.soak.scenes import on_worlds

        return on_worlds.kinds(group)
    if group not in GROUPS:
        raise ValueError(f"no group of scenes {group!r}; there are {', '.join(GROUPS)}")
    return kinds_of(import_module(f"{__name__}.{group}"))
