"""A line chart in characters: braille dots for the line, a sign for single points. Knows nothing of runs."""

from __future__ import annotations

from collections.abc import Sequence

# Dot (column, row) of a braille cell -> bit of its code point (Unicode 11.0, chapter 21.1).
_BRAILLE_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE_BLANK = 0x2800
_LABEL_WIDTH = 7
Points = Sequence[tuple[float, float]]


def text_chart(line: Points, marks: Points = (), *, width: int = 70, height: int = 14, mark: str = "◆") -> str:
    """`line` joined up and `marks` on top of it, in `height` rows of at most `width` characters plus the axes.

    Empty where there is nothing to draw.
    """
    points = [*line, *marks]
    if not points:
        return ""
    left, right = _range([x for x, _ in points])
    low, high = _range([y for _, y in points])
    columns, rows = (width - _LABEL_WIDTH - 2) * 2, height * 4

    def dot(x: float, y: float) -> tuple[int, int]:
        return round((x - left) / (right - left) * (columns - 1)), round((high - y) / (high - low) * (rows - 1))

    cells = [[0] * (columns // 2) for _ in range(height)]
    dots = [dot(x, y) for x, y in line]
    for start, end in zip(dots, dots[1:] or dots, strict=False):
        for column, row in _between(start, end):
            cells[row // 4][column // 2] |= _BRAILLE_BITS[column % 2][row % 4]
    canvas = [[chr(_BRAILLE_BLANK + bits) if bits else " " for bits in row] for row in cells]
    for x, y in marks:
        column, row = dot(x, y)
        canvas[row // 4][column // 2] = mark

    middle = height // 2
    labels = {0: high, middle: high - (high - low) * (middle * 4 + 2) / rows, height - 1: low}
    text = []
    for row, characters in enumerate(canvas):
        label, axis = (_label(labels[row]), "┤") if row in labels else ("", "│")
        text.append(f"{label:>{_LABEL_WIDTH}} {axis}{''.join(characters)}")
    indent = " " * (_LABEL_WIDTH + 1)
    first, last = f"{left:g}", f"{right:g}"
    text.append(f"{indent}└{'─' * (columns // 2)}")
    text.append(f"{indent} {first}{last:>{columns // 2 - len(first)}}")
    return "\n".join(row.rstrip() for row in text)


def _range(values: list[float]) -> tuple[float, float]:
    """Lowest and highest, set apart where they are equal."""
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of the straight line, both ends included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]


def _label(value: float) -> str:
    return f"{value:.3g}"
