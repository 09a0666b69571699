"""The installed SGLang: its flags, and what differs between its releases.

Flags are read from the package's source, without importing it (importing takes seconds). SGLang declares a flag as
`name: A[type, Arg(help=..., choices=...)] = default` in the classes under `srt/arg_groups/fields/` (0.5.17: in
`ServerArgs` itself), and a few explicitly in `ServerArgs.add_cli_args`. This file follows the rules of
`sglang.srt.arg_groups.arg_utils.add_cli_args_from_dataclass`; a slow test compares it with the real parser, flag by
flag. Choices computed at run time are not checked here: the server rejects a wrong value.

Differences between releases are detected by the contents of the package. Version numbers are compared only if nothing
else distinguishes the releases; so detection also works for untested ones. docs/versions.md lists the tested ones.
`engines.sglang.control` handles the differences of the HTTP API.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# sglang's actions for deprecated switches; 0.5.20 uses none of them
RETIRED_SWITCHES = ("DeprecatedAction", "DeprecatedStoreConstAction")


class UnreadableFlagsError(RuntimeError):
    """The installed sglang declares its flags in a way this reader does not know."""


@dataclasses.dataclass(frozen=True)
class DeclaredFlag:
    """One flag as the engine's parser registers it.

    `type` is "str", "int", "float" or the name of sglang's parsing function; `action` is "store", "store_true" or
    "optional_switch" (which also has a `--no-` form). `choices` is None if any value is valid or they are computed.
    """

    dest: str
    names: tuple[str, ...]  # without the leading dashes
    type: str = "str"
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    action: str = "store"


def read_server_flags() -> list[DeclaredFlag]:
    """Every flag of the installed sglang's server.

    Raises ModuleNotFoundError if sglang is absent and UnreadableFlagsError if its source has an unknown structure.
    """
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the package sglang is not installed: --sglang-* flags are taken from it")
    root = Path(package.submodule_search_locations[0])
    modules = _Modules(root)
    server_args = root / "srt" / "server_args.py"
    flags: list[DeclaredFlag] = []
    for path in (*sorted((root / "srt" / "arg_groups" / "fields").glob("*.py")), server_args):
        flags += _annotated_flags(modules.load(path), modules)
    flags += _manual_flags(modules.load(server_args), modules)
    if not any(flag.dest == "model_path" for flag in flags) or len(flags) < 100:
        raise UnreadableFlagsError(
            f"the sglang in {root} declares its flags in a way slimrl cannot read ({len(flags)} found):"
            " install the version that slimrl pins (sglang==0.5.20)"
        )
    return flags


@dataclasses.dataclass(frozen=True)
class _Module:
    """The names of one source file: assigned expressions, classes, and imports from other modules."""

    assigned: dict[str, ast.expr]
    classes: dict[str, ast.ClassDef]
    imported: dict[str, tuple[str, str]]

    @classmethod
    def parse(cls, path: Path) -> _Module:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.module]
        return cls(
            _assignments(body),
            {node.name: node for node in body if isinstance(node, ast.ClassDef)},
            {a.asname or a.name: (str(node.module), a.name) for node in imports for a in node.names},
        )


def _assignments(body: list[ast.stmt]) -> dict[str, ast.expr]:
    plain = {n.targets[0].id: n.value for n in body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)}
    annotated = [n for n in body if isinstance(n, ast.AnnAssign)]
    return plain | {n.target.id: n.value for n in annotated if isinstance(n.target, ast.Name) and n.value is not None}


class _Modules:
    """Source files of the package, parsed once each."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loaded: dict[Path, _Module] = {}

    def load(self, path: Path) -> _Module:
        if path not in self._loaded:
            self._loaded[path] = _Module.parse(path)
        return self._loaded[path]

    def literal(self, node: ast.expr | None, module: _Module) -> Any:
        """The value of an expression of literals, sums, and names that resolve to such; None for any other."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.literal(node.left, module), self.literal(node.right, module)
            return None if left is None or right is None else [*left, *right]
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            values = [self.literal(item, module) for item in node.elts]
            return None if any(value is None for value in values) else values
        if isinstance(node, ast.Name):
            return self._named(node.id, module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return self._class_attribute(node.value.id, node.attr, module)
        if isinstance(node, ast.Constant | ast.Dict | ast.UnaryOp):
            try:
                return ast.literal_eval(node)
            except ValueError:
                return None
        return None

    def _named(self, name: str, module: _Module) -> Any:
        if name in module.assigned:
            return self.literal(module.assigned[name], module)
        source = self._source_of(name, module)
        return self._named(module.imported[name][1], source) if source else None

    def _class_attribute(self, name: str, attribute: str, module: _Module) -> Any:
        if name in module.classes:
            own = _assignments(module.classes[name].body)  # a class body sees its own names first
            return self.literal(own.get(attribute), dataclasses.replace(module, assigned=module.assigned | own))
        source = self._source_of(name, module)
        return self._class_attribute(module.imported[name][1], attribute, source) if source else None

    def _source_of(self, name: str, module: _Module) -> _Module | None:
        if name not in module.imported:
            return None
        package, *parts = module.imported[name][0].split(".")
        path = self._root.joinpath(*parts).with_suffix(".py")
        if package != self._root.name:
            return None
        return self.load(path) if path.is_file() else None


def _annotated_flags(module: _Module, modules: _Modules) -> list[DeclaredFlag]:
    flags = []
    for cls in module.classes.values():
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                flag = _annotated_flag(node.target.id, node.annotation, module, modules)
                flags += [flag] if flag else []
    return flags


def _annotated_flag(dest: str, annotation: ast.expr, module: _Module, modules: _Modules) -> DeclaredFlag | None:
    """The flag of `dest: A[type, metadata...]`; None if the field has no metadata or no command-line flag."""
    if not (isinstance(annotation, ast.Subscript) and _name(annotation.value) == "A"):
        return None
    assert isinstance(annotation.slice, ast.Tuple)
    value_type, *metadata = annotation.slice.elts
    described = next((m for m in metadata if _name(m) == "Arg" or not isinstance(m, ast.Call)), None)
    if described is None:
        return None
    keywords = described.keywords if isinstance(described, ast.Call) else []
    arg = {k.arg: k.value for k in keywords if k.arg is not None}
    if modules.literal(arg.get("no_cli"), module):
        return None
    spelled = modules.literal(arg.get("cli_name"), module) or "--" + dest.replace("_", "-")
    names = (spelled, *(modules.literal(arg.get("aliases"), module) or ()))
    flag = DeclaredFlag(dest, tuple(name.lstrip("-") for name in names))
    if "action" in arg:
        return _with_action(flag, arg, module, modules)
    return _with_value(flag, _without_optional(value_type), arg, module, modules)


def _with_action(flag: DeclaredFlag, arg: dict[str, ast.expr], module: _Module, modules: _Modules) -> DeclaredFlag:
    if _name(arg["action"]) == "BooleanOptionalAction":
        return dataclasses.replace(flag, action="optional_switch")
    extra = arg.get("action_kwargs")
    pairs: dict[Any, ast.expr] = {}
    if isinstance(extra, ast.Dict):
        pairs = {k.value: v for k, v in zip(extra.keys, extra.values, strict=True) if isinstance(k, ast.Constant)}
    return dataclasses.replace(
        flag, type=_name(pairs.get("type")) or "str", nargs=modules.literal(pairs.get("nargs"), module)
    )


def _with_value(
    flag: DeclaredFlag, value_type: ast.expr, arg: dict[str, ast.expr], module: _Module, modules: _Modules
) -> DeclaredFlag:
    choices, nargs = modules.literal(arg.get("choices"), module), modules.literal(arg.get("nargs"), module)
    parser = _name(arg.get("type_parser"))
    outer = _name(value_type.value) if isinstance(value_type, ast.Subscript) else _name(value_type)
    if outer == "Literal" and isinstance(value_type, ast.Subscript):
        values = modules.literal(value_type.slice, module)
        values = values if isinstance(values, list) else [values]
        choices, value_type, nargs = choices or values, ast.Name(type(values[0]).__name__), None
    elif outer in ("List", "list") and parser is None:
        value_type, nargs = value_type.slice if isinstance(value_type, ast.Subscript) else ast.Name("str"), nargs or "+"
    elif outer == "bool":
        return dataclasses.replace(flag, action="store_true")
    name = _name(value_type)
    plain = name if name in ("int", "float") else "str"
    return dataclasses.replace(
        flag, type=parser or plain, nargs=nargs, choices=tuple(choices) if choices is not None else None
    )


def _manual_flags(module: _Module, modules: _Modules) -> list[DeclaredFlag]:
    """The `parser.add_argument("--x", ...)` calls of `ServerArgs.add_cli_args`, without deprecated switches.

    These either do nothing or set another flag to a constant.
    """
    flags = []
    for node in ast.walk(module.classes["ServerArgs"]):
        if not (isinstance(node, ast.Call) and _name(node.func) == "add_argument"):
            continue
        names = tuple(str(a.value).lstrip("-") for a in node.args if isinstance(a, ast.Constant))
        arg = {k.arg: k.value for k in node.keywords}
        action = modules.literal(arg.get("action"), module) or _name(arg.get("action")) or "store"
        choices = modules.literal(arg.get("choices"), module)
        if action in RETIRED_SWITCHES and "nargs" not in arg:
            continue
        flags.append(
            DeclaredFlag(
                modules.literal(arg.get("dest"), module) or names[0].replace("-", "_"),
                names,
                type=_name(arg.get("type")) or "str",
                nargs=modules.literal(arg.get("nargs"), module),
                choices=tuple(choices) if choices is not None else None,
                action="store_true" if action in ("store_true", "DeprecatedStoreTrueAction") else "store",
            )
        )
    return flags


def _name(node: ast.expr | None) -> str | None:
    """`x` for the expressions `x`, `a.x` and `x(...)`."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _without_optional(node: ast.expr) -> ast.expr:
    """`T` for `Optional[T]`, `T | None` and `Union[T, None]`."""
    if isinstance(node, ast.Subscript) and _name(node.value) == "Optional":
        return node.slice
    members: list[ast.expr] = []
    if isinstance(node, ast.Subscript) and _name(node.value) == "Union":
        members = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else []
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        members = [node.left, node.right]
    kept = [m for m in members if not (isinstance(m, ast.Constant) and m.value is None)]
    return kept[0] if len(kept) == 1 else node


# name that slimrl needs -> the modules that may define it, the newest release's first
PLACES: dict[str, tuple[str, ...]] = {
    "add_deterministic_attention_backend_choices": (
        "sglang.srt.arg_groups.choices",
        "sglang.srt.server_args",  # 0.5.17
    ),
}

# the first release that reports the weight version of each token; older ones report only the last version
VERSIONS_OF_TOKENS_SINCE = (0, 5, 19)

FindClass = Callable[[Any, str, str], Any]


class UnknownEngineError(RuntimeError):
    """The installed sglang defines a name that slimrl needs in none of the known modules."""


def has_per_token_versions(version: str) -> bool:
    """Whether SGLang `version` ("0.5.20", "0.5.20.post1") reports versions per token; true if it is not a number."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return numbers is None or tuple(map(int, numbers.groups())) >= VERSIONS_OF_TOKENS_SINCE


def module_with(name: str) -> ModuleType:
    """The module of the installed sglang that defines `name`, a key of `PLACES`. Raises UnknownEngineError."""
    for place in PLACES[name]:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:
                raise  # the module exists, but one of its imports does not
        else:
            if hasattr(module, name):
                return module
    raise UnknownEngineError(
        f"the installed sglang has {name} in none of {', '.join(PLACES[name])}: install a version of docs/versions.md"
    )


def allow_shm_unpickling(unpickler: type) -> None:
    """Lets sglang's `SafeUnpickler` open references to host memory, which weight updates by shared memory contain.

    Up to 0.5.20 it accepts them. Later releases have a list of allowed names, which covers only CUDA memory.
    """
    if not hasattr(unpickler, "ALLOWED_GLOBALS"):
        return
    unpickler.find_class = _with_allowed_names(unpickler.find_class)  # type: ignore[attr-defined]


def _with_allowed_names(find_class: FindClass) -> FindClass:
    import torch
    import torch.distributed as dist

    extension: Any = torch._C
    functions = extension._VariableFunctionsClass
    allowed = {
        ("builtins", "getattr"): _restricted_getattr(
            {(functions, name): getattr(torch, name) for name in ("from_file", "as_strided", "frombuffer")}
        ),
        ("torch._C", "_VariableFunctionsClass"): functions,
        # selects the receiving rank's reference among those of several ranks
        ("builtins", "next"): next,
        ("itertools", "islice"): itertools.islice,
        ("itertools", "starmap"): itertools.starmap,
        ("torch.distributed.distributed_c10d", "get_rank"): dist.get_rank,
    }

    def either(self: Any, module: str, name: str) -> Any:
        return allowed[module, name] if (module, name) in allowed else find_class(self, module, name)

    return either


def _restricted_getattr(known: dict[tuple[Any, str], Any]) -> Callable[[Any, str], Any]:
    """A `getattr` restricted to `known` attributes: the real one would let a pickle access anything."""

    def get(owner: Any, name: str) -> Any:
        if (owner, name) not in known:
            raise RuntimeError(f"a pickle may not access the attribute {name!r} of {owner!r}")
        return known[owner, name]

    return get
