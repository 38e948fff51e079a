"""YAML as its readers mean it: ``1e-5`` is a number, a date is text, and a key stands once.

PyYAML's safe loader reads ``1e-5`` as text (YAML 1.1 wants a point in it), ``2023-10-08`` as a date, and of a key that
stands twice silently takes the last.
"""

import re
from typing import Any

import yaml

from pardemo import project

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is no name for a key", node.start_mark)
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would take for something else."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def parse(text: str) -> Any:
    """Parses ``text``.

    Raises:
        ValueError: it is not YAML; one line, with the line number where one is known.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"line {mark.line + 1}: {error.problem}" if mark else str(error.problem)) from None
    except yaml.YAMLError as error:
        raise ValueError(project.one_line(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump(value: Any) -> str:
    """``value`` as YAML that :func:`parse` reads back as it is, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
