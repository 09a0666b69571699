"""YAML for readers: keys in the order given, scripts as literal blocks, a comment first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Never writes anchors, which readers and some tools do not follow."""

    def ignore_aliases(self, data: Any) -> bool:
        """True."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def yaml_text(comment: Iterable[str], *documents: Mapping[str, Any]) -> str:
    """The documents of a file, after `comment` line by line."""
    head = "".join(f"# {line}\n" if line else "#\n" for line in comment)
    bodies = [yaml.dump(dict(one), Dumper=_Dumper, sort_keys=False, width=10**6) for one in documents]
    return head + "---\n".join(bodies)
