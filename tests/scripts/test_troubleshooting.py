"""The messages quoted in the troubleshooting page exist in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "\0"  # a value inserted into a message


def text_of(node: ast.expr) -> str | None:
    """A string of the source with a gap for every value; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or GAP if isinstance(part, ast.Constant) else GAP for part in node.values)
    return None


def messages_of_the_code() -> list[str]:
    found = []
    for path in [*ROOT.glob("slimrl/**/*.py"), *ROOT.glob("scripts/lib/*.py"), *ROOT.glob("tools/*.py")]:
        texts = [text_of(node) for node in ast.walk(ast.parse(path.read_text()))]
        found += [re.sub(r"%(?:\.\d+)?[sdgf]", GAP, text) for text in texts if text]
    return found


def quoted_messages() -> list[str]:
    """The first column of every table with a column "message", without rows about cases that print none."""
    rows, inside = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if cells[0].lstrip("| ") == "message":
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and (quote := re.match(r"\|? ?`([^`]+)`", cells[0])):
            rows.append(quote[1])
    return rows


MESSAGES = messages_of_the_code()


def parts_of(quote: str) -> list[str]:
    """The fixed parts of a message: the longest run of words of each part between two `...`."""
    parts = [part.strip(" :,()[]") for part in re.split(r"\.\.\.|\[[^\]]*\]|\d+", quote)]
    return [part for part in parts if len(part.split()) >= 2]


def is_printed(part: str) -> bool:
    """Whether one message has the words, ignoring values of flags and numbers."""
    pattern = re.compile(r"(?:\0|\s)+".join(f"(?:{re.escape(word)}|\0)" for word in part.split()))
    return any(pattern.search(message) for message in MESSAGES)


def test_page_quotes_many_messages():
    assert len(quoted_messages()) > 35


@pytest.mark.parametrize("quote", quoted_messages())
def test_quoted_message_exists_in_the_code(quote):
    unknown = [part for part in parts_of(quote) if not is_printed(part)]
    assert not unknown, f"no message of the code has {unknown}"
