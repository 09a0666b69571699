"""Opens a YAML or JSON file that a flag names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_yaml(path: Path) -> Any:
    """The file's content. Raises OSError where it cannot be read and ValueError where it is not YAML (or JSON)."""
    if not path.is_file():
        raise FileNotFoundError("the file does not exist: check the path")
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    import yaml  # only where such a file is given: everything else here needs the standard library alone

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"the file is not YAML ({' '.join(str(error).split())})") from error
