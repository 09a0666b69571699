"""Pieces of the plan's text: tables, and the GPUs of a role by node."""

from __future__ import annotations

from collections.abc import Sequence

from slimrl.arguments.dry_run.plan import Plan

LISTED = 4


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns padded to their widest entry; cells that are no text, or end in a unit, stand right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts if column < len(row)) for column in range(max(map(len, texts)))]
    lines = []
    for row, cells in zip(texts, rows, strict=True):
        padded = [
            text.rjust(width) if _is_number(cell) else text.ljust(width)
            for text, width, cell in zip(row, widths, cells, strict=False)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _is_number(cell: object) -> bool:
    return not isinstance(cell, str) or cell.endswith((" GiB", " MiB"))


def where_on(plan: Plan, positions: Sequence[int]) -> str:
    """ "0: 2-3; 1: 0": the GPUs at these positions on each node."""
    parts = []
    for node in plan.placement.nodes_of(positions):
        gpus = [plan.placement.places[i].gpu for i in positions if plan.placement.places[i].node == node]
        parts.append(f"{node}: {span(gpus)}")
    return "; ".join(parts[:LISTED] + ([f"... {parts[-1]}"] if len(parts) > LISTED else []))


def span(numbers: Sequence[int]) -> str:
    """ "2-5" for consecutive numbers, "2" for one."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
