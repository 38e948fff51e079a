"""The kinds of scene, a module for each group; a group's module is imported when it is asked for.

A new kind is a function under ``@scene`` in one of the modules; a new group is a module, a line here, and a share in
:mod:`pardemo.soak.schedule`.
"""

from types import ModuleType

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
    return kinds_of(_module(group))


def _module(group: str) -> ModuleType:
    if group == "world":
        from pardemo.soak.scenes import world as module
    elif group == "cluster":
        from pardemo.soak.scenes import cluster as module
    elif group == "checkpoints":
        from pardemo.soak.scenes import checkpoints as module
    elif group == "runner":
        from pardemo.soak.scenes import runner as module
    elif group == "finetune":
        from pardemo.soak.scenes import finetune as module
    elif group == "measure":
        from pardemo.soak.scenes import measure as module
    else:
        raise ValueError(f"no group of scenes {group!r}; there are {', '.join(GROUPS)}")
    return module
