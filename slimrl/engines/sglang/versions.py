"""Where SGLang's releases differ in what slimrl uses of them, each difference told by what the installed package has.

A version number is compared only where nothing else tells: a release between two that were run is answered by the same
questions. What was run is in docs/versions.md. Called by the process of a server on a machine without CUDA and by
`engines.sglang.control`, which knows what differs in requests; what differs in flags is in `server_args_parser`.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

# what slimrl needs -> the modules that may hold it, the newest release's first
PLACES: dict[str, tuple[str, ...]] = {
    "add_deterministic_attention_backend_choices": (
        "sglang.srt.arg_groups.choices",
        "sglang.srt.server_args",  # 0.5.17
    ),
}

# the first release whose answers say which weights drew which tokens; an older one names the last weights for all
VERSIONS_OF_TOKENS_SINCE = (0, 5, 19)

FindClass = Callable[[Any, str, str], Any]


class UnknownEngineError(RuntimeError):
    """The installed sglang holds something that slimrl needs in none of the places known."""


def tells_versions_of_tokens(version: str) -> bool:
    """Whether SGLang `version` ("0.5.20", also "0.5.20.post1") does; a version that is no number is taken as new."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return numbers is None or tuple(map(int, numbers.groups())) >= VERSIONS_OF_TOKENS_SINCE


def module_with(name: str) -> ModuleType:
    """The module of the installed sglang that has `name`, a key of `PLACES`. Raises UnknownEngineError."""
    for place in PLACES[name]:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:
                raise  # the place is there, and something that it needs is not
        else:
            if hasattr(module, name):
                return module
    raise UnknownEngineError(
        f"the installed sglang has {name} in none of {', '.join(PLACES[name])}: install a version of docs/versions.md"
    )


def admit_references(unpickler: type) -> None:
    """Lets sglang's `SafeUnpickler` open references to host memory, as weight updates by shared memory make them.

    Up to 0.5.20 it admits them by itself. Later ones have a list of names; references in CUDA memory are on it.
    """
    if not hasattr(unpickler, "ALLOWED_GLOBALS"):
        return
    unpickler.find_class = _admitting(unpickler.find_class)  # type: ignore[attr-defined]


def _admitting(find_class: FindClass) -> FindClass:
    import torch
    import torch.distributed as dist

    functions = torch._C._VariableFunctionsClass  # type: ignore[attr-defined]
    admitted = {
        ("builtins", "getattr"): _getattr_of({(functions, "from_file"): torch.from_file}),
        ("torch._C", "_VariableFunctionsClass"): functions,
        # the reference of the receiver's own rank, out of those of several
        ("builtins", "next"): next,
        ("itertools", "islice"): itertools.islice,
        ("itertools", "starmap"): itertools.starmap,
        ("torch.distributed.distributed_c10d", "get_rank"): dist.get_rank,
    }

    def either(self: Any, module: str, name: str) -> Any:
        return admitted[module, name] if (module, name) in admitted else find_class(self, module, name)

    return either


def _getattr_of(known: dict[tuple[Any, str], Any]) -> Callable[[Any, str], Any]:
    """A `getattr` that knows these attributes only: the real one would open everything to a pickle."""

    def get(owner: Any, name: str) -> Any:
        if (owner, name) not in known:
            raise RuntimeError(f"a pickle may not ask for the attribute {name!r} of {owner!r}")
        return known[owner, name]

    return get
