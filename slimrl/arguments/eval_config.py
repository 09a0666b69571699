"""Reads --eval-config: a YAML or JSON file with `datasets` and `defaults`, in a mapping of its own or under `eval`.

Promises entries whose every key is a field of `EvalDataset` with a value of its type and range; whatever else stands
in the file is a problem that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.arguments.flag import Bounds
from slimrl.arguments.namespace import EvalDataset
from slimrl.arguments.problem import Problem, ended
from slimrl.arguments.yaml_file import read_yaml

_FIELDS = {field.name: typing.get_type_hints(EvalDataset)[field.name] for field in dataclasses.fields(EvalDataset)}
_BOUNDS = {
    "n_samples_per_eval_prompt": Bounds(at_least=1),
    "temperature": Bounds(at_least=0),
    "top_p": Bounds(above=0, at_most=1),
    "top_k": Bounds(at_least=-1, other_than=0),
    "max_response_len": Bounds(at_least=1),
    "max_prompt_len": Bounds(at_least=1),
    "max_context_len": Bounds(at_least=2),
    "min_new_tokens": Bounds(at_least=0),
    "repetition_penalty": Bounds(above=0, at_most=2),
}
# keys that slime knows, with what to do instead
_NOT_SERVED = {
    "multimodal_keys": "prompts are text in this version; leave it out",
    "min_eval_samples": "every row is asked n_samples_per_eval_prompt times; give that",
    "reward_model": "a set is judged by rm_type or custom_rm_path; give one of them",
    "message_processor": "messages go through the chat template as they are; prepare them in the file",
    **dict.fromkeys(("app_service", "remote_environment", "eval_task_timeout"), "nothing reads it; leave it out"),
}


def read_eval_config(config_path: str, problems: list[Problem]) -> list[dict[str, Any]]:
    """The sets of the file, each over the file's defaults; a bad set is left out and becomes a problem."""
    complaints: list[str] = []
    try:
        entries = _entries(read_yaml(Path(config_path)), complaints)
    except (OSError, ValueError) as error:
        complaints, entries = [str(error)], []
    problems += [
        Problem("--eval-config", ended(f"--eval-config {config_path}: {complaint}")) for complaint in complaints
    ]
    return entries


def _entries(root: Any, complaints: list[str]) -> list[dict[str, Any]]:
    root = root.get("eval", root) if isinstance(root, dict) else root
    if not isinstance(root, dict):
        raise ValueError("the file must hold a mapping with datasets (and defaults)")
    for key in sorted(set(root) - {"defaults", "datasets"}, key=str):
        complaints.append(f"{key!r} means nothing beside datasets and defaults: remove it, or move it under defaults")
    datasets, defaults = root.get("datasets"), root.get("defaults") or {}
    if isinstance(datasets, dict):
        datasets = [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in datasets.items()]
    if not isinstance(datasets, list) or not datasets:
        raise ValueError("datasets must list at least one set with name and path")
    if not isinstance(defaults, dict):
        raise ValueError("defaults must be a mapping of values for every set")
    complaints += _complaints(defaults, "defaults")
    entries = []
    for number, entry in enumerate(datasets, start=1):
        if not isinstance(entry, dict) or not {"name", "path"} <= set(entry):
            complaints.append(f"set {number} must be a mapping with at least name and path")
        elif found := _complaints(entry, f"set {number} ({entry['name']})"):
            complaints += found
        else:
            entries.append({**{key: value for key, value in defaults.items() if key in _FIELDS}, **entry})
    return entries


def _complaints(values: Mapping[str, Any], where: str) -> list[str]:
    """What is wrong with a set's keys and values."""
    complaints = []
    for key, value in values.items():
        if key in _NOT_SERVED:
            complaints.append(f"{where} has {key}, which is not served: {_NOT_SERVED[key]}")
        elif key not in _FIELDS:
            nearest = difflib.get_close_matches(str(key), _FIELDS, n=1)
            guess = f", did you mean {nearest[0]}?" if nearest else ""
            complaints.append(f"{where} has an unknown key {key!r}{guess}")
        elif not _has_type(value, _FIELDS[key]):
            complaints.append(f"{where} has {key} {value!r}, which is not of type {_type_name(_FIELDS[key])}")
        elif key in _BOUNDS and value is not None:
            try:
                _BOUNDS[key].check(value)
            except ValueError as error:
                complaints.append(f"{where} has {key} {value}, which {error}")
    return complaints


def _has_type(value: Any, hint: Any) -> bool:
    options = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is list:
            item = typing.get_args(option)[0]
            if isinstance(value, list) and all(_has_type(part, item) for part in value):
                return True
        elif kind is float or kind is int:
            if isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool):
                return True
        elif isinstance(value, kind):
            return True
    return False


def _type_name(hint: Any) -> str:
    return str(hint) if typing.get_args(hint) else hint.__name__
