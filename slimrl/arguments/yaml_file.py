"""Opens a YAML or JSON file that a flag names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_yaml(path: Path) -> Any:
    """The file's content.

    Raises OSError where it cannot be read and ValueError where it is not YAML (or JSON), or a mapping has a key twice.
    """
    if not path.is_file():
        raise FileNotFoundError(
            "is not a file: check the path" if path.exists() else "the file does not exist: check the path"
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text, object_pairs_hook=_mapping_of_pairs)
    import yaml  # only where such a file is given: everything else here needs the standard library alone

    try:
        for node in _mappings(yaml.compose(text, Loader=yaml.SafeLoader)):
            _check_keys(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the file is not YAML ({' '.join(str(error).split())})") from error


def _mapping_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_keys(key for key, _ in pairs)
    return dict(pairs)


def _mappings(root: Any) -> Iterable[Any]:
    """Every mapping node of a composed YAML document; the parser's own reading keeps the last of equal keys."""
    pending, seen = [root], set()
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))  # an alias is the node itself
        if isinstance(node.value, list) and node.value and isinstance(node.value[0], tuple):
            yield node
            pending += [value for _, value in node.value]
        else:
            pending += node.value


def _check_keys(keys: Iterable[str]) -> None:
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} stands there twice: keep one of them")
