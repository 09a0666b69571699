"""Reads --custom-config-path: a YAML mapping of flags, checked like the words of the command line.

A key is a flag with or without its dashes ("lr", "rollout_batch_size", "--sglang-mem-fraction-static") or the
attribute it sets ("rewards_normalization"). What it gives wins over the command line. Settings of the user's own hooks
stand under `custom` and reach them as `args.custom`; any other key is a problem.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.arguments.flag import FlagSpec
from slimrl.arguments.parser import ParsedLine, parse_line
from slimrl.arguments.passthrough import PassthroughTables
from slimrl.arguments.problem import Problem, ended
from slimrl.arguments.yaml_file import read_yaml

_OWN = "custom"


def read_config_file(path: str, specs: list[FlagSpec], passthrough: PassthroughTables) -> ParsedLine:
    """The file's flags as if they had been typed; `custom` lies in `values` under that name."""
    parsed = ParsedLine(options={prefix: {} for prefix in passthrough})
    try:
        mapping = read_yaml(Path(path))
        if not isinstance(mapping, dict):
            raise ValueError("the file must hold a mapping of flags to values")
    except (OSError, ValueError) as error:
        _complain(parsed, path, str(error))
        return parsed
    by_key = {spec.dest: spec for spec in specs}
    by_key |= {name.removeprefix("--").replace("-", "_"): spec for spec in specs for name in spec.on}
    words: list[str] = []
    for key, value in mapping.items():
        plain = str(key).removeprefix("--").replace("-", "_")
        if plain == _OWN and isinstance(value, dict):
            parsed.values[_OWN] = value
        elif plain in by_key:
            _take(by_key[plain], key, value, path, parsed)
        elif plain.split("_")[0] in passthrough:
            words += _as_words(plain, value)
        else:
            _complain(parsed, path, _unknown(str(key), plain, by_key))
    if words:
        passed = parse_line(words, specs, passthrough)
        for prefix, options in passed.options.items():
            parsed.options[prefix] |= options
        for problem in passed.problems:
            _complain(parsed, path, problem.sentence.removesuffix("."))
    return parsed


def _take(spec: FlagSpec, key: Any, value: Any, path: str, parsed: ParsedLine) -> None:
    """One flag's value, of the type that the command line would have made of it."""
    try:
        parsed.values[spec.dest] = _value(spec, value)
    except ValueError as error:
        shown = json.dumps(value, default=str)
        _complain(parsed, path, f"{key}: {shown} {error}")
        parsed.broken.add(spec.dest)


def _value(spec: FlagSpec, value: Any) -> Any:
    if value is None and spec.default is None:
        return None
    if spec.is_switch:
        if isinstance(value, bool):
            return value
        raise ValueError("is neither true nor false")
    if isinstance(value, bool) or value is None:
        raise ValueError(f"is not what {spec.name} takes")
    if spec.value_type is dict:
        return spec.convert(value if isinstance(value, str) else json.dumps(value))
    if spec.many:
        return [spec.convert(str(item)) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and spec.parse is None:
        raise ValueError("is a list, and one value is wanted")
    return spec.convert(str(value))


def _as_words(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    items = value if isinstance(value, list) else [value]
    return [flag, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in items)]


def _unknown(key: str, plain: str, known: Mapping[str, FlagSpec]) -> str:
    nearest = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    mend = f"did you mean {nearest[0]}?" if nearest else "docs/flags.md has them all"
    return f"{key} is no flag: put settings of your own hooks under {_OWN}; {mend}"


def _complain(parsed: ParsedLine, path: str, complaint: str) -> None:
    parsed.problems.append(Problem("--custom-config-path", ended(f"--custom-config-path {path}: {complaint}")))
