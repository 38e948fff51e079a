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
        from pardemo.soak.scenes import world

        return world
    if group == "cluster":
        from pardemo.soak.scenes import cluster

        return cluster
    if group == "checkpoints":
        from pardemo.soak.scenes import checkpoints

        return checkpoints
    if group == "runner":
        from pardemo.soak.scenes import runner

        return runner
    if group == "finetune":
        from pardemo.soak.scenes import finetune

        return finetune
    if group == "measure":
        from pardemo.soak.scenes import measure

        return measure
    raise ValueError(f"no group of scenes {group!r}; there are {', '.join(GROUPS)}")
