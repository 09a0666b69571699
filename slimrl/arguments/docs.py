"""The flags as text: docs/flags.md (`python -m slimrl.arguments.docs > docs/flags.md`) and `--help`.

Both are made from the declarations, so they cannot say anything else than the parser does.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator

from slimrl.arguments.flag import Bounds, FlagSpec, flag_specs
from slimrl.arguments.namespace import GROUPS

_INTRODUCTION = """\
# Flags

One flat list of flags for `train.py` and `train_async.py`. This page is made from their declarations:
`python -m slimrl.arguments.docs > docs/flags.md`.

- A flag is written in full, `--flag value` or `--flag=value`; where it occurs twice, the last one counts.
- A switch takes no value. A flag marked `...` takes one value and more.
- An unknown flag, a value that does not fit and a broken rule between flags are all reported at once, before
  anything starts; the exit code is then 2.
- The default is in its column; where that says `-`, the meaning ends with what is used instead, in brackets.
- Any other `--sglang-<x>` goes to the SGLang servers as their `--<x>`, any other `--router-<x>` to the router.
- Paths of functions are dotted import paths (`package.module.function`); their contracts are in `slimrl/hooks/`.
- On a machine without GPUs, a GPU is a logical GPU of Ray: a share of the CPUs.
- Flags that Megatron-LM or slime have and that this version does not serve are listed too: *refused* says what to
  use instead. Their default is accepted, so that a script which spells it out runs.
"""


def markdown() -> str:
    """The whole page."""
    return _INTRODUCTION + "".join(_section(group) for group in GROUPS)


def help_text(entry: str) -> str:
    """The same for a terminal."""
    lines = [f"python3 {entry} <flags>; flags with their defaults in brackets (docs/flags.md has those refused too):"]
    for group in GROUPS:
        served = [spec for spec in flag_specs(group) if spec.not_served is None or spec.served]
        lines += ["", _title(group)] if served else []
        for spec in served:
            default = "" if _default(spec) == "-" else f" [{_default(spec)}]"
            lines.append(f"  {', '.join(spec.on + spec.off)} {_value(spec)}".rstrip() + default)
            lines += textwrap.wrap(spec.help, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _section(group: type) -> str:
    rows = "\n".join(_row(spec) for spec in flag_specs(group))
    return f"\n## {_title(group)}\n\n| flag | value | default | meaning |\n| --- | --- | --- | --- |\n{rows}\n"


def _title(group: type) -> str:
    return (inspect.getdoc(group) or group.__name__).splitlines()[0].split(". ")[0].rstrip(".")


def _row(spec: FlagSpec) -> str:
    names = ", ".join(f"`{name}`" for name in spec.on + spec.off)
    cells = (names, _value(spec), _default(spec), spec.help + _refusal(spec))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _refusal(spec: FlagSpec) -> str:
    if spec.not_served is None:
        return ""
    but = f" other than {', '.join(map(str, spec.served))}" if spec.served else ""
    return f" (*refused{but}*: {spec.not_served})"


def _value(spec: FlagSpec) -> str:
    if spec.is_switch:
        return ""
    if spec.choices is not None:
        return ", ".join(map(str, spec.choices)) + (" ..." if spec.many else "")
    if spec.parse is not None and spec.value_type is not str:
        return "integer or list expression"
    kind = {int: "integer", float: "number", str: "text", dict: "JSON"}[spec.value_type]
    return " ".join([kind + (" ..." if spec.many else ""), *_limits(spec.bounds)])


def _limits(bounds: Bounds) -> Iterator[str]:
    for sign, limit in (
        ("≥", bounds.at_least),
        (">", bounds.above),
        ("≤", bounds.at_most),
        ("<", bounds.below),
        ("≠", bounds.other_than),
    ):
        if limit is not None:
            yield f"{sign} {limit:.10g}"


def _default(spec: FlagSpec) -> str:
    if spec.is_switch:
        return "-"
    if spec.default is None:
        return "-"
    if isinstance(spec.default, list):
        return " ".join(map(str, spec.default)) or "-"
    return json.dumps(spec.default) if isinstance(spec.default, dict) else str(spec.default)


if __name__ == "__main__":
    print(markdown(), end="")
