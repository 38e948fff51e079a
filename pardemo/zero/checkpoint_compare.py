"""Does a checkpoint fit the engine that is to read it? Anybody may have written its manifest."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

PLAIN = (int, float, str, bool, type(None))


def is_plain(value: object) -> bool:
    """Whether JSON keeps the value as it is: a number, text, None, or a list of them."""
    return isinstance(value, PLAIN) or (isinstance(value, list) and all(isinstance(item, PLAIN) for item in value))


def check_form(manifest: dict[str, Any], what: str) -> None:
    """ValueError where a manifest's content is not built as :func:`pardemo.zero.save` builds it.

    What has to be the engine's own value, such as a dtype, is compared later.
    """

    def check(right: bool, name: str) -> None:
        if not right:
            raise ValueError(f"{what}: the manifest's {name} is not what is written there")

    units, states = manifest.get("units"), manifest.get("states")
    check(_all(units, dict), "units")
    for unit in units:
        check(_all(unit.get("parameters"), str), "units")
    check(_all(manifest.get("files"), dict) and len(manifest["files"]) > 0, "files")
    check(_all(manifest.get("param_groups"), dict), "param_groups")
    check(isinstance(manifest.get("alike"), dict), "alike")
    check(_all(states, dict) and len(states) == len(units), "states")
    for unit, state in zip(units, states, strict=True):
        check(all(isinstance(state.get(key), dict) for key in ("sharded", "alike", "numbers")), "states")
        chunk, elements = state.get("chunk"), unit.get("elements")
        check(type(chunk) is int and type(elements) is int and 0 < elements <= chunk * len(manifest["files"]), "chunk")


def compare_models(manifest: dict[str, Any], ours: dict[str, Any], what: str) -> None:
    """ValueError that names the first thing in which checkpoint and engine differ."""
    for key in ("stage", "parameter groups"):
        if manifest.get(key) != ours[key]:
            raise ValueError(f"{what} has {key} {_short(manifest.get(key))}, this engine {ours[key]}")
    if len(manifest["param_groups"]) != ours["parameter groups"]:
        raise ValueError(f"{what} has settings of {len(manifest['param_groups'])} parameter groups")
    group_of, our_group_of = (
        {name: unit.get("group") for unit in units for name in unit["parameters"]}
        for units in (manifest["units"], ours["units"])
    )
    for name in (group_of.keys() ^ our_group_of.keys()) or (manifest["alike"].keys() ^ ours["alike"].keys()):
        raise ValueError(f"{what} is of another model: only one of both has {_short(name)}")
    for name, group in group_of.items():
        if group != our_group_of[name]:
            raise ValueError(
                f"{what} has {name} in parameter group {_short(group)}, this engine in {our_group_of[name]}"
            )
    for theirs, unit in zip_longest(manifest["units"], ours["units"]):
        if theirs != unit:
            raise ValueError(
                f"{what} has other units than this engine (layers, buckets, dtypes): {_short(theirs)} against {unit}"
            )
    for name, form in ours["alike"].items():
        if manifest["alike"][name] != form:
            raise ValueError(f"{what} has {name} as {_short(manifest['alike'][name])}, this engine as {form}")


def has_no_states(saved: dict[str, Any]) -> bool:
    """Whether a unit was saved without states of the optimizer: before its first step, or there are none at all."""
    return set(saved["sharded"]) == {"parameters"} and not saved["alike"] and not saved["numbers"]


def compare_states(saved: dict[str, Any], ours: dict[str, Any], what: str) -> None:
    """ValueError where the optimizer kept something else of a unit than this engine's optimizer does."""
    for kind in ("sharded", "alike", "numbers"):
        theirs, mine = saved[kind], ours[kind]
        if theirs.keys() != mine.keys():
            raise ValueError(
                f"{what} is of another optimizer: it kept {_names(saved)}, this engine's keeps {_names(ours)}"
            )
        for name, value in theirs.items():
            fits = _fits(value, mine[name]) if kind == "numbers" else value == mine[name]
            if not fits:
                raise ValueError(
                    f"{what} has {name} as {_short(value)}, this engine's optimizer as {_short(mine[name])}"
                )


def check_settings(saved: dict[str, Any], ours: dict[str, Any], what: str) -> None:
    """ValueError where a parameter group's saved settings are no values for this optimizer.

    Settings that only the checkpoint has (a schedule's ``initial_lr``) are taken over.
    """
    for name, value in saved.items():
        if name == "params":
            raise ValueError(f"{what} has a setting params in a parameter group, which is the engine's own")
        if not is_plain(value) or (name in ours and not _fits(value, ours[name])):
            raise ValueError(
                f"{what} has the setting {_short(name)} {_short(value)} in a parameter group, this engine "
                f"{_short(ours.get(name))}"
            )


def like(value: Any, ours: Any) -> Any:
    """A setting from JSON in the form in which the engine's optimizer has it: a tensor, a tuple, or as it is."""
    if torch.is_tensor(ours):
        return ours.new_tensor(value)
    return tuple(value) if isinstance(ours, tuple) else value


def compare_ranks(described: Sequence[Any], digests: Sequence[str]) -> None:
    """ValueError where what should be the same on every rank is not: only one rank's would be kept."""
    for rank, (theirs, digest) in enumerate(zip(described, digests, strict=True)):
        if json.dumps(theirs) != json.dumps(described[0]) or digest != digests[0]:  # texts: NaN is NaN there
            raise ValueError(
                f"the optimizer keeps numbers or tensors that are not cut as the parameters are, and rank {rank}'s "
                "differ from rank 0's: a checkpoint holds one rank's"
            )


def _fits(value: Any, ours: Any) -> bool:
    """Whether a value from JSON may stand where the optimizer has ``ours``."""
    if torch.is_tensor(ours):
        return not ours.dim() and _is_number(value)
    if isinstance(ours, (list, tuple)):
        return isinstance(value, list) and len(value) == len(ours) and all(map(_fits, value, ours))
    if _is_number(ours):
        return _is_number(value)
    kinds = (bool, type(None)) if isinstance(ours, bool) else PLAIN if ours is None else (type(ours),)
    return isinstance(value, kinds)


def _is_number(value: object) -> bool:
    """Whether it is a number that a tensor can hold; bool is none."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _all(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _names(states: dict[str, Any]) -> str:
    names = {name.removeprefix("optimizer.") for kind in ("sharded", "alike", "numbers") for name in states[kind]}
    return _short(", ".join(sorted(names - {"parameters"})) or "nothing")


def _short(value: Any) -> str:
    """A value of the manifest in one line."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
