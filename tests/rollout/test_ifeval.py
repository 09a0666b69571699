"""Every verifiable instruction, once followed and once not."""

import pytest

from slimrl.rollout.rm_hub.ifeval import followed, known_instructions, of_metadata, sentences

LONG = "One two three. Four five! Is it six? Dr. Who said e.g. seven."

# id, arguments, a response that follows it, one that does not
CASES = [
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "A BIG deal",
        "a BIG deal",
    ),
    ("change_case:english_capital", {}, "THIS IS A SHORT ANSWER IN ENGLISH.", "This is a short answer in English."),
    ("change_case:english_lowercase", {}, "this is a short answer in english.", "This is a short answer in english."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Say hi.\nhi", "hi"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [address]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Thanks", "Bye. PST"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. Thanks", "Bye.\nP.S. Thanks"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "maybe"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1, 2]}\n```', "{a: 1}"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a Section 2 b",
        "Section 1",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n* two\n* three"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one* and * *"),
    ("detectable_format:title", {}, "<<joy>>\nA poem", "<< >>"),
    ("keywords:existence", {"keywords": ["red", "Blue"]}, "Blue and reddish", "blue"),
    ("keywords:forbidden_words", {"forbidden_words": ["red"]}, "reddish", "Red."),
    ("keywords:frequency", {"keyword": "ab", "frequency": 2, "relation": "at least"}, "ab Ab", "ab abc"),
    ("keywords:frequency", {"keyword": "ab", "frequency": 2, "relation": "less than"}, "ab", "ab ab"),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "at least"}, "banAna", "bana"),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist eine kurze Antwort auf Deutsch.",
        "This is a short answer in English.",
    ),
    (
        "language:response_language",
        {"language": "hi"},
        "\u092f\u0939 \u090f\u0915 \u0909\u0924\u094d\u0924\u0930 \u0939\u0948",
        "This is a short answer.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        'a\n\n"So, b',
        "so\n\na",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:number_sentences", {"num_sentences": 4, "relation": "at least"}, LONG, "One. Two. 3.5."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 5, "relation": "less than"},
        LONG,
        "A b. B c. C d. D e. E f.",
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one, two-three", "one two"),
    ("punctuation:no_comma", {}, "one; two", "one, two"),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "Bye. any questions? ", "Any questions? No."),
    ("startend:quotation", {}, ' "quoted" ', '"quoted'),
]


def follows(response, name, values):
    metadata = {"instruction_id_list": [name], "kwargs": [values]}
    return followed(response, of_metadata(metadata))[0]


@pytest.mark.parametrize(("name", "values", "good", "bad"), CASES)
def test_instruction_accepts_only_responses_that_follow_it(name, values, good, bad):
    assert follows(good, name, values) and not follows(bad, name, values)


def test_every_supported_instruction_is_tested():
    assert {name for name, *_ in CASES} == set(known_instructions())


def test_all_25_instructions_of_the_public_benchmark_are_supported():
    assert len([name for name in known_instructions() if not name.startswith("count:")]) >= 25


def test_empty_response_follows_no_instruction():
    assert not follows("", "punctuation:no_comma", {})


def test_arguments_without_meaning_for_an_instruction_are_ignored():
    instructions = of_metadata(
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None, "language": None}]}
    )
    assert instructions == [{"id": "punctuation:no_comma", "values": {}}]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "metadata.instruction_id_list is missing or empty"),
        ({"instruction_id_list": ["no:such"]}, "has 'no:such', which is unknown: use one of"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, "lacks end_phrase: fix the row"),
        (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
            "must have one entry for each of the 1 instructions",
        ),
    ],
)
def test_ungradable_rows_are_errors(metadata, message):
    with pytest.raises(ValueError, match=message):
        of_metadata(metadata)


def test_sentences_do_not_end_at_abbreviations_or_inside_numbers():
    assert sentences(LONG) == ["One two three.", "Four five!", "Is it six?", "Dr. Who said e.g. seven."]
    assert len(sentences("It costs 3.50 dollars. Mr. J. Smith paid.\n\nNo end")) == 3
