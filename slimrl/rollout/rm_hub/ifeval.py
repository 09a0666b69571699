"""Verifiable instructions, as in IFEval (Zhou et al., 2023) and IFBench: format, counts, content, language.

`of_metadata` reads and validates the instructions of a sample: `metadata.instruction_id_list`, with the arguments of
each in `metadata.kwargs`. `followed` checks a response against them.

Nothing is downloaded. py3langid detects languages; its model of 97 languages is part of the package.
"""

from __future__ import annotations

import inspect
import json
import re
import unicodedata
from collections.abc import Callable
from typing import Any

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL | re.IGNORECASE)


def number_of_bullets(response: str, num_bullets: int) -> bool:
    """Exactly `num_bullets` lines that begin with `*` or `-`."""
    return len(re.findall(r"(?m)^\s*(?:\*(?!\*)|-(?!-))\s*\S", response)) == num_bullets


def number_of_highlights(response: str, num_highlights: int) -> bool:
    """At least `num_highlights` texts between single or double asterisks."""
    found = [first or second for first, second in _HIGHLIGHT.findall(response)]
    return sum(bool(text.strip()) for text in found) >= num_highlights


def number_of_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """At least `num_sections` sections that begin with the word and a number, `Section 1`."""
    return len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", response)) >= num_sections


def number_of_placeholders(response: str, num_placeholders: int) -> bool:
    """At least `num_placeholders` names in square brackets, `[address]`."""
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


def is_constrained_response(response: str) -> bool:
    return any(choice in response for choice in CONSTRAINED_RESPONSES)


def has_title(response: str) -> bool:
    """A title in double angular brackets, `<<poem of joy>>`."""
    return any(title.strip() for title in re.findall(r"<<([^<>\n]+)>>", response))


def is_json(response: str) -> bool:
    """The whole response is JSON; a surrounding Markdown fence is ignored."""
    fenced = _FENCE.fullmatch(response.strip())
    try:
        json.loads(response if fenced is None else fenced[1])
    except (ValueError, RecursionError):
        return False
    return True


FORMAT_CHECKS: dict[str, Callable[..., bool]] = {
    "detectable_content:number_placeholders": number_of_placeholders,
    "detectable_format:constrained_response": is_constrained_response,
    "detectable_format:json_format": is_json,
    "detectable_format:multiple_sections": number_of_sections,
    "detectable_format:number_bullet_lists": number_of_bullets,
    "detectable_format:number_highlighted_sections": number_of_highlights,
    "detectable_format:title": has_title,
}


_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"([.!?]+)([\"')\]*_”’]*)(?=\s|$)")
_ABBREVIATIONS = {
    "mr", "mrs", "ms", "dr", "prof", "rev", "gen", "sen", "rep", "st", "jr", "sr", "inc", "ltd", "co", "corp", "vs",
    "etc", "e.g", "i.e", "fig", "no", "vol", "approx", "u.s", "u.k", "a.m", "p.m", "ph.d", "jan", "feb", "mar", "apr",
    "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
}  # fmt: skip
_AT_LEAST = {"at least", "more than or equal to", ">="}
_LESS_THAN = {"less than", "fewer than", "<"}
_AT_MOST = {"at most", "<="}
_MORE_THAN = {"more than", ">"}
_EXACTLY = {"exactly", "equal to", "==", "="}


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """The sentences, split after `.`, `!` and `?` where a new one can start, and at blank lines."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        start = 0
        for match in _SENTENCE_END.finditer(block):
            rest = block[match.end() :].lstrip()
            if match[1] == "." and (_abbreviates(block[: match.start()]) or rest[:1].islower()):
                continue
            found.append(block[start : match.end()].strip())
            start = match.end()
        found.append(block[start:].strip())
    return [sentence for sentence in found if _WORD.search(sentence)]


def paragraphs(text: str, separator: str = r"\n\s*\n") -> list[str]:
    """The parts between separators that are not blank."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def holds(count: int, relation: str, wanted: int) -> bool:
    """Whether `count` `relation` `wanted` is true. Raises ValueError for an unknown relation."""
    relation = relation.strip().casefold()
    for names, result in (
        (_AT_LEAST, count >= wanted),
        (_LESS_THAN, count < wanted),
        (_AT_MOST, count <= wanted),
        (_MORE_THAN, count > wanted),
        (_EXACTLY, count == wanted),
    ):
        if relation in names:
            return result
    raise ValueError(f"the relation {relation!r} is unknown: use 'at least', 'less than', 'at most' or 'exactly'")


def occurrences(text: str, phrase: str) -> int:
    """Number of occurrences of a word or phrase as whole words, ignoring case."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE))


def _abbreviates(before: str) -> bool:
    word = before.rsplit(None, 1)[-1].casefold().lstrip("(\"'*") if before.split() else ""
    return word in _ABBREVIATIONS or re.search(r"(?<!\w)[A-HJ-Z]$", before) is not None


def number_of_words(response: str, num_words: int, relation: str = "at least") -> bool:
    return holds(len(words(response)), relation, num_words)


def number_of_sentences(response: str, num_sentences: int, relation: str = "at least") -> bool:
    return holds(len(sentences(response)), relation, num_sentences)


def number_of_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Paragraphs are separated by `***`."""
    return len(paragraphs(response, r"\s*\*\*\*\s*")) == num_paragraphs


def first_word_of_paragraph(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are separated by blank lines; punctuation and case of the word are ignored."""
    parts = paragraphs(response, r"\n\n")
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = parts[nth_paragraph - 1].split()[0].lstrip("\"'*_(“‘")
    return first.casefold().rstrip(".,;:!?\"'*_)”’") == first_word.casefold()


def keyword_frequency(response: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return holds(occurrences(response, keyword.strip()), relation, frequency)


def letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return holds(response.casefold().count(letter.casefold()), let_relation, let_frequency)


def words_in_capitals(response: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    capitals = [word for word in words(response) if word.isupper()]
    return holds(len(capitals), capital_relation, capital_frequency)


COUNT_CHECKS: dict[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": words_in_capitals,
    "keywords:frequency": keyword_frequency,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:nth_paragraph_first_word": first_word_of_paragraph,
    "length_constraints:number_paragraphs": number_of_paragraphs,
    "length_constraints:number_sentences": number_of_sentences,
    "length_constraints:number_words": number_of_words,
}


def is_language(text: str, code: str) -> bool:
    """Whether the text is in the language of this ISO 639-1 code (`zh-cn` counts as `zh`).

    Raises ValueError if py3langid does not support the language.
    """
    import py3langid  # loads a 5 MB model, which few samples need

    code = code.casefold().split("-")[0]
    if code not in {language for language, _ in py3langid.rank("")}:
        raise ValueError(f"the language {code!r} is unknown: give an ISO 639-1 code such as 'en'")
    # capitals are rare in the model's training data
    return py3langid.classify(text.lower())[0] == code


def has_keywords(response: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords)


def has_no_forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    return not any(occurrences(response, word) for word in forbidden_words)


def in_language(response: str, language: str) -> bool:
    """`language` is an ISO 639-1 code. Raises ValueError if it is not supported."""
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
    """Two different texts separated by `******`, which may also be at either end."""
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


CONTENT_CHECKS: dict[str, Callable[..., bool]] = {
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


Check = Callable[..., bool]

_CHECKS: dict[str, Check] = {**CONTENT_CHECKS, **COUNT_CHECKS, **FORMAT_CHECKS}


def known_instructions() -> list[str]:
    """Every instruction id that can be checked."""
    return sorted(_CHECKS)


def of_metadata(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The validated instructions of a sample as `{"id", "values"}`. Raises ValueError if one cannot be checked."""
    ids, values = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(ids, list) or not ids:
        raise ValueError(
            "metadata.instruction_id_list is missing or empty, but ifeval rewards need it: check --metadata-key"
        )
    values = [None] * len(ids) if values is None else values
    if not isinstance(values, list) or len(values) != len(ids):
        raise ValueError(f"metadata.kwargs must have one entry for each of the {len(ids)} instructions: fix the row")
    return [_checked(name, given or {}) for name, given in zip(ids, values, strict=True)]


def followed(response: str, instructions: list[dict[str, Any]]) -> list[bool]:
    """Whether the response follows each instruction; an empty response follows none."""
    return [
        bool(response.strip()) and bool(_CHECKS[instruction["id"]](response, **instruction["values"]))
        for instruction in instructions
    ]


def _checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    if name not in _CHECKS:
        raise ValueError(
            f"metadata.instruction_id_list has {name!r}, which is unknown: use one of {', '.join(known_instructions())}"
        )
    parameters = list(inspect.signature(_CHECKS[name]).parameters.values())[1:]
    # datasets give every instruction the keys of all of them, null if unused
    values = {
        parameter.name: given[parameter.name] for parameter in parameters if given.get(parameter.name) is not None
    }
    missing = [one.name for one in parameters if one.default is one.empty and one.name not in values]
    if missing:
        raise ValueError(f"metadata.kwargs of {name} lacks {', '.join(missing)}: fix the row")
    return {"id": name, "values": values}


__all__ = ["followed", "known_instructions", "of_metadata"]
