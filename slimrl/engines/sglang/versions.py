"""Differences between SGLang releases that affect slimrl, detected by the contents of the installed package.

Version numbers are compared only if nothing else distinguishes the releases; so detection also works for untested
releases. docs/versions.md lists the tested ones. Used by the server's process on a machine without CUDA and by
`engines.sglang.control`, which handles differences of the HTTP API; `server_args_parser` handles those of the flags.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

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
