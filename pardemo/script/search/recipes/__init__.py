"""Reads the recipes of a search: scripts that train small models in a library's layouts, with their axes."""

import tomllib
from pathlib import Path
from typing import Any

from pardemo.script.compare.run_layouts import words_of

FOLDER = Path(__file__).resolve().parent


def recipes() -> dict[str, dict[str, Any]]:
    """Returns all recipes by name: each with ``what``, ``script``, a table ``search``, ``double``."""
    return tomllib.loads((FOLDER / "recipes.toml").read_text("utf-8"))


def recipe(name: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Returns a recipe's words, its table ``[search]``, and what else it says, as of a ``prove.toml``.

    Raises:
        ValueError: there is no such recipe; one line.
    """
    known = recipes()
    if name not in known:
        raise ValueError(f"there is no recipe {name}: say one of {', '.join(known)}")
    chosen = known[name]
    script, *words = words_of(chosen["script"])
    return [str(FOLDER / "scripts" / script), *words], chosen["search"], {"double": chosen.get("double", False)}


def package_of(name: str) -> str:
    """Returns the package whose layouts a recipe tries, which its name begins with."""
    library = name.partition("-")[0]
    return {"megatron": "megatron-core"}.get(library, library)


def recipes_text() -> str:
    """Lists the recipes, a line each."""
    known = recipes()
    width = max(map(len, known))
    return "\n".join(f"{name:{width}}  {chosen['what']}" for name, chosen in known.items())
