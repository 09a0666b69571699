"""Instructions about what a response says: keywords, language, case, beginnings and ends, the prompt repeated."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from slimrl.rollout.rm_hub.instructions.languages import is_language
from slimrl.rollout.rm_hub.instructions.text import occurrences


def has_keywords(response: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords)


def has_no_forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    return not any(occurrences(response, word) for word in forbidden_words)


def in_language(response: str, language: str) -> bool:
    """`language` is an ISO 639-1 code. Raises ValueError where it is not one that can be told."""
    return is_language(response, language)


def english_in_capitals(response: str) -> bool:
    return response.isupper() and is_language(response, "en")


def english_in_lower_case(response: str) -> bool:
    return response.islower() and is_language(response, "en")


def has_no_comma(response: str) -> bool:
    return not any("COMMA" in unicodedata.name(character, "") for character in set(response))


def ends_with(response: str, end_phrase: str) -> bool:
    return _folded(response).strip('"').endswith(_folded(end_phrase))


def in_quotation_marks(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def repeats_prompt(response: str, prompt_to_repeat: str) -> bool:
    return _folded(response).startswith(_folded(prompt_to_repeat))


def gives_two_responses(response: str) -> bool:
    """Two different texts with `******` between them, which may also stand at either end."""
    parts = response.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    texts = [part.strip() for part in parts if part.strip()]
    return len(texts) == 2 and texts[0] != texts[1]


def has_postscript(response: str, postscript_marker: str = "P.S.") -> bool:
    letters = [re.escape(letter) for letter in re.sub(r"[.\s]", "", postscript_marker)]
    return re.search(r"(?m)(?<!\w)" + r"\.?\s?".join(letters) + r"\.?(?!\w)", response, re.IGNORECASE) is not None


def _folded(text: str) -> str:
    return text.strip().casefold()


CHECKS: dict[str, Callable[..., bool]] = {
    "change_case:english_capital": english_in_capitals,
    "change_case:english_lowercase": english_in_lower_case,
    "combination:repeat_prompt": repeats_prompt,
    "combination:two_responses": gives_two_responses,
    "detectable_content:postscript": has_postscript,
    "keywords:existence": has_keywords,
    "keywords:forbidden_words": has_no_forbidden_words,
    "language:response_language": in_language,
    "punctuation:no_comma": has_no_comma,
    "startend:end_checker": ends_with,
    "startend:quotation": in_quotation_marks,
}
