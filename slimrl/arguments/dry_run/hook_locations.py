"""Where every hook of a run is written: file and line, found in the source without importing it."""

from __future__ import annotations

import ast
import dataclasses
import importlib.machinery
import sys
from pathlib import Path
from typing import Any

from slimrl.arguments.flag import FlagSpec
from slimrl.arguments.namespace import Arguments, all_flag_specs
from slimrl.hooks import own_path
from slimrl.renamed_modules import current_path


@dataclasses.dataclass(frozen=True)
class HookLocation:
    """`door` is the flag (or the evaluation set's entry), `function` its dotted path; `line` is None if not found."""

    door: str
    function: str
    file: Path
    line: int | None


def hook_places(args: Arguments) -> list[HookLocation]:
    """Every `--...-path` flag that leads to a module, and the hooks of single evaluation sets."""
    values = vars(args)
    doors: list[tuple[str, str | None]] = []
    for spec in all_flag_specs():
        value = values[spec.dest]
        if _may_name_code(spec, value):
            doors += [(spec.name, path) for path in (value if spec.many else [value])]
    for dataset in args.eval_datasets:
        if dataset.custom_rm_path != args.custom_rm_path:
            doors.append((f"eval set {dataset.name}: custom_rm_path", dataset.custom_rm_path))
        if dataset.custom_generate_function_path != args.custom_generate_function_path:
            path = dataset.custom_generate_function_path
            doors.append((f"eval set {dataset.name}: custom_generate_function_path", path))
    if args.spec is not None:
        doors.append(("--spec", ".".join(args.spec)))
    places = [_place(door, own_path(path)) for door, path in doors if path]
    return [place for place in places if place is not None]


def _may_name_code(spec: FlagSpec, value: Any) -> bool:
    """Also false for the default of a flag that is not served: nothing of that name is called."""
    unused = spec.not_served is not None and value == spec.default
    return spec.value_type is str and spec.dest.endswith("_path") and not unused


def _place(door: str, path: str) -> HookLocation | None:
    """None where the value is no dotted path of a module, but for example a file."""
    module, _, name = path.rpartition(".")
    file = _source(module) if module and all(part.isidentifier() for part in path.split(".")) else None
    if file is None:
        return None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return HookLocation(door, path, file, node.lineno)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return HookLocation(door, path, file, node.lineno)
    return HookLocation(door, path, file, None)


def _source(module: str) -> Path | None:
    """The file of a module; each package on the way is looked up by its folder, so that none is imported."""
    folders = [*sys.path, str(Path.cwd())]
    spec = None
    for part in current_path(module).split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
