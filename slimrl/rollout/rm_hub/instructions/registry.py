"""Which instructions exist, and checking a response against a list of them.

Data sets name them in `metadata.instruction_id_list` with the values of each in `metadata.kwargs`, as IFEval does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from slimrl.rollout.rm_hub.instructions import content, counts, form

Check = Callable[..., bool]

_CHECKS: dict[str, Check] = {**content.CHECKS, **counts.CHECKS, **form.CHECKS}


def known_instructions() -> list[str]:
    """Every instruction id that can be checked."""
    return sorted(_CHECKS)


def of_metadata(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The instructions of a sample as `{"id", "values"}`, checked. Raises ValueError where one cannot be judged."""
    ids, values = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(ids, list) or not ids:
        raise ValueError(
            "metadata.instruction_id_list is missing or empty, and ifeval rewards need it: check --metadata-key"
        )
    values = [None] * len(ids) if values is None else values
    if not isinstance(values, list) or len(values) != len(ids):
        raise ValueError(f"metadata.kwargs has not one entry for each of the {len(ids)} instructions: mend the row")
    return [_checked(name, given or {}) for name, given in zip(ids, values, strict=True)]


def followed(response: str, instructions: list[dict[str, Any]]) -> list[bool]:
    """Whether the response follows each instruction; an empty response follows none."""
    return [
        bool(response.strip()) and bool(_CHECKS[wanted["id"]](response, **wanted["values"])) for wanted in instructions
    ]


def _checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    if name not in _CHECKS:
        raise ValueError(
            f"metadata.instruction_id_list has {name!r}, which is not known: use one of"
            f" {', '.join(known_instructions())}"
        )
    parameters = list(inspect.signature(_CHECKS[name]).parameters.values())[1:]
    # data sets give every instruction the keys of all of them, null where they mean nothing
    values = {
        parameter.name: given[parameter.name] for parameter in parameters if given.get(parameter.name) is not None
    }
    missing = [one.name for one in parameters if one.default is one.empty and one.name not in values]
    if missing:
        raise ValueError(f"metadata.kwargs of {name} lacks {', '.join(missing)}: mend the row")
    return {"id": name, "values": values}
