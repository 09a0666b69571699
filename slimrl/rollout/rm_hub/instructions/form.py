"""Instructions about the form of a response: lists, sections, highlights, titles, placeholders, JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL | re.IGNORECASE)


def number_of_bullets(response: str, num_bullets: int) -> bool:
    """Exactly so many lines that begin with `*` or `-`."""
    return len(re.findall(r"(?m)^\s*(?:\*(?!\*)|-(?!-))\s*\S", response)) == num_bullets


def number_of_highlights(response: str, num_highlights: int) -> bool:
    """At least so many stretches between single or double asterisks."""
    found = [first or second for first, second in _HIGHLIGHT.findall(response)]
    return sum(bool(text.strip()) for text in found) >= num_highlights


def number_of_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections that begin with the word and a number, `Section 1`."""
    return len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", response)) >= num_sections


def number_of_placeholders(response: str, num_placeholders: int) -> bool:
    """At least so many names in square brackets, `[address]`."""
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


def is_constrained_response(response: str) -> bool:
    return any(choice in response for choice in CONSTRAINED_RESPONSES)


def has_title(response: str) -> bool:
    """A title in double angular brackets, `<<poem of joy>>`."""
    return any(title.strip() for title in re.findall(r"<<([^<>\n]+)>>", response))


def is_json(response: str) -> bool:
    """The whole response is JSON; a Markdown fence around it does not count."""
    fenced = _FENCE.fullmatch(response.strip())
    try:
        json.loads(response if fenced is None else fenced[1])
    except (ValueError, RecursionError):
        return False
    return True


CHECKS: dict[str, Callable[..., bool]] = {
    "detectable_content:number_placeholders": number_of_placeholders,
    "detectable_format:constrained_response": is_constrained_response,
    "detectable_format:json_format": is_json,
    "detectable_format:multiple_sections": number_of_sections,
    "detectable_format:number_bullet_lists": number_of_bullets,
    "detectable_format:number_highlighted_sections": number_of_highlights,
    "detectable_format:title": has_title,
}
