"""Instructions that count: words, sentences, paragraphs, letters, keywords, capitals."""

from __future__ import annotations

from collections.abc import Callable

from slimrl.rollout.rm_hub.instructions.text import holds, occurrences, paragraphs, sentences, words


def number_of_words(response: str, num_words: int, relation: str = "at least") -> bool:
    return holds(len(words(response)), relation, num_words)


def number_of_sentences(response: str, num_sentences: int, relation: str = "at least") -> bool:
    return holds(len(sentences(response)), relation, num_sentences)


def number_of_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Paragraphs are divided by `***`."""
    return len(paragraphs(response, r"\s*\*\*\*\s*")) == num_paragraphs


def first_word_of_paragraph(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by blank lines; the word counts without punctuation and case."""
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


CHECKS: dict[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": words_in_capitals,
    "keywords:frequency": keyword_frequency,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:nth_paragraph_first_word": first_word_of_paragraph,
    "length_constraints:number_paragraphs": number_of_paragraphs,
    "length_constraints:number_sentences": number_of_sentences,
    "length_constraints:number_words": number_of_words,
}
