"""Extracts from a text which choice letters it mentions, and whether it says that a letter is, or is not, the answer.

A letter alone means nothing: "(B), (C), (D) are not" names three. The text before and after it in its sentence decides.
"""

from __future__ import annotations

import dataclasses
import re

MAX_CHARS = 20_000
_BEFORE_CHARS, _AFTER_CHARS, _GAP_CHARS = 80, 60, 20

_DRESS = r"[\s*_$`\\({\[]*(?:\\?(?:text|textbf|mathbf|mathrm|boxed)\s*\{[\s(*]*)?"
_MENTION = re.compile(
    r"\((?P<parenthesised>[A-J])\)|(?<![A-Za-z0-9_À-ɏ'’°\\])(?P<bare>[A-J])(?![A-Za-z0-9_À-ɏ'’]|-\w)"
    r"|(?<=[\s(*:])(?P<small>[a-j])(?=[\s*_$]*(?:[).}\]\n]|$))"
)
# `A` and `I` are also words, unless the following text cannot follow these words
_NO_ARTICLE = re.compile(
    r"[)*_\]}$.:;,<]|\s*$|\s*\n"
    r"|\s+(?:is|are|and|or|nor|was|were|would|cannot|can|could|seems?|looks|because|since|but|as|has)\b"
)
# no opening bracket in between: "C (A is wrong)" is not a list
_JOIN = re.compile(r"[\s*_)\]}$]*(?:[,;/&][\s,;/&*_\[$]*)?(?:\b(?:and|(?P<or>or|nor|oder|ou)|und|et|y)\b[\s*_\[$]*)?")
_KEY = (
    r"(?:answer|choice|option|selection|conclusion|vote|exception|odd one(?: out)?|(?:correct|right|best) one"
    r"|réponse|respuesta|risposta|resposta|antwort|ответ|答案)"
)
_LINK_WORDS = (
    "is was be being would must should will has have to can could might only indeed therefore thus hence then so again"
    " clearly definitely certainly probably likely most simply here option choice letter answer statement the correct"
    " right best one est ist es la le el è é correcta correcte bonne richtige lautet text textbf mathbf boxed"
)
_LINK = rf"(?:\s|[:=：>*_$`\\(\[{{]|是|为|(?<!\w)(?:{'|'.join(_LINK_WORDS.split())})(?!\w))*"
_AFFIRMED_BEFORE = re.compile(
    rf"(?:{_KEY}|\b(?:go(?:ing)? with|choose|chose|pick|select(?:ed)?|leaves|leaving|gives|yields|settle on|points to"
    rf"|it(?: is|'s|’s)|has to be|must be|so|thus|hence|therefore|only(?:\s\w+){{1,5}}\sis|only|definitely|clearly"
    rf"|correct)|选择?){_LINK}[\s*_$`\\({{\[]*$",
    re.IGNORECASE,
)
_NAMED_ONLY = re.compile(rf"\b(?:option|choice)s?{_DRESS}$", re.IGNORECASE)
_NAMED_ANSWER = re.compile(r"\banswers?[\s*_(]*$", re.IGNORECASE)
_SAID_BEFORE = re.compile(
    rf"(?:(?:answer|correct|right|best|final)\s+(?:option|choice)|\b(?:with|choose|pick|select)\s+(?:option|choice))"
    rf"{_LINK}$",
    re.IGNORECASE,
)
_SAID = re.compile(rf"{_KEY}{_LINK}$", re.IGNORECASE)
_STATED = re.compile(
    rf"{_KEY}{_LINK}(?:[:=：>是为]|(?<!\w)(?:is|was|be|being|should|must|est|es|ist|lautet|è|é)(?!\w)){_LINK}$",
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    rf"\b(?:go(?:ing)? with|choose|chose|pick|select(?:ed)?|settle on){_LINK}[\s*_$`\\({{\[]*$", re.IGNORECASE
)
_FALSE_ONE = re.compile(
    rf"\b(?:false|incorrect|untrue|wrong)\s+(?:statement|one){_LINK}(?<!\w)(?:is|:){_LINK}$", re.IGNORECASE
)
_BUT = re.compile(r"\b(?:but|rather|instead)(?:\s+(?:rather|option|choice))?[\s*_(]*$", re.IGNORECASE)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|cannot|never|neither|eliminat\w+|exclud\w+|except|rul(?:e|es|ed|ing) out|reject\w*|discard\w*"
    r"|none of|unlike|rather than|instead of|wrong answer is|nicht|pas)|n['’]t|不是|不选)"
    r"(?:\s|[*_(:]|\b(?:be|been|the|answer|options?|choices?|letter|either|both|is|to|simply|it|think|believe|that"
    r"|correct|right|of)\b)*$",
    re.IGNORECASE,
)
# "A and C, but not B" may answer a question for the exception
_NEGATED_BEFORE = re.compile(
    r"(?:(?<!but )(?<!except )\b(?:not|cannot|never|neither|wrong answer is|nicht|pas)|n['’]t|不是|不选)"
    r"(?:\s|[*_(:]|\b(?:be|been|the|answer|options?|choices?|letter|either|is|to|simply|it|think|believe|that|correct"
    r"|right)\b)*$",
    re.IGNORECASE,
)
_OPEN_BEFORE = re.compile(r"\b(?:either|between|whether)(?:\s|[*_(]|\b(?:option|choice)s?\b)*$", re.IGNORECASE)
_ADVERBS = (
    r"(?:\s+(?:all|also|both|clearly|therefore|thus|then|definitely|certainly|simply|indeed|actually|likely|probably"
    r"|most))*"
)
# the text between a letter and its predicate: neither another letter nor the start of another clause
_OTHER_LETTER = r"(?<![A-Za-z0-9°])[A-J](?![A-Za-z0-9])"
_GAP = (
    rf"(?:(?:(?!{_OTHER_LETTER}|\b(?:because|since|as|while|whereas|and|but|so|although|though|if|when|for)\b)"
    r"[^.;:\n(),]){0,30}?\s)??"
)
_GAP_BEFORE_PRAISE = rf"(?:(?:(?!{_OTHER_LETTER}|\b(?:while|whereas|but|although|though)\b)[^.;\n(),]){{0,30}}?\s)??"
_DENIAL = (
    r"(?:"
    rf"(?:is|are|was|were|can|could|would|does|do|did|must|be|seems?){_ADVERBS}(?:\s+(?:not|never)|n['’]t)"
    r"(?=\s*(?:[.,;:)*_]|$|\n)|\s+(?:be\b|the\b|an?\s+(?:option|answer|choice)\b"
    r"|correct|right|true|possible|valid|likely|consistent|fit|hold|work|apply|match))"
    r"|cannot\s+be"
    rf"|(?:is|are|was|were|must\s+be|can\s+be|seems?|being){_ADVERBS}\s+(?:(?:ruled|left|thrown)?\s*out\b|incorrect"
    r"|wrong|false|eliminated|excluded|impossible|invalid|rejected|discarded|(?:far\s+|much\s+)?too\b)"
    r"|:\s*(?:false|wrong|incorrect|no\b))"
)
_DENIED_AFTER = re.compile(rf"[)*_\]}}$\s]*{_GAP}{_DENIAL}", re.IGNORECASE)
_DENIED_DIRECTLY = re.compile(rf"[)*_\]}}$\s]*(?:but\s+(?:that|this|it)\s+)?{_DENIAL}", re.IGNORECASE)
_NOT_THE_ANSWER = re.compile(
    r"[)*_\]}$\s]*(?:is|can|could|was)(?:\s+not|n['’]t|not)(?:\s+(?:be|the|correct|right|best))*"
    r"\s+(?:answer|option|choice)\b",
    re.IGNORECASE,
)
_AFFIRMED_AFTER = re.compile(
    rf"[)*_\]}}$\s]*{_GAP_BEFORE_PRAISE}"
    rf"(?:(?:is|must\s+be|remains|seems|fits|looks){_ADVERBS}(?:\s+(?:the|only|single|one|an?))*\s+"
    r"(?:correct|right|true|best|answer|accurate|valid|only\s+(?:one|option|choice))\b|:\s*(?:true|correct)\b)",
    re.IGNORECASE,
)
_THE_ANSWER_AFTER = re.compile(
    rf"[)*_\]}}$\s]*{_GAP}(?:is|must\s+be|remains|seems){_ADVERBS}\s+(?:the|my|our)(?:\s+(?:only|single|correct|right|best))*"
    r"\s+(?:(?:final\s+)?(?:answer|option|choice)|one)\b(?!\s+(?:that|which|with|for|of|in|where|when))",
    re.IGNORECASE,
)
_VERB = re.compile(
    r"[)*_\]}$\s]*(?:(?:is|are|was|were|can|could|cannot|does|do|did|has|have|had|would|must|seems?|fail|violate"
    r"|contradict)(?:n['’]t)?\b|(?!this|thus|always|respectively)[a-z]{3,}s\b)"
)
_REASON = re.compile(r"\s*,?\s*(?:because|since|as|for|due|given|not|rather|instead|and not)\b")
_RETRACTED = re.compile(
    r"\b(?:wait|actually|hmm+|oops|second thought|correction|reconsider\w*|made (?:a|an) \w*\s?(?:mistake|error)"
    r"|i was (?:wrong|mistaken)|(?:that|this)(?: is|['’]s) (?:wrong|incorrect|not right))\b"
    r"|(?:[.!]\s|\n)\s{0,3}no[,:!—]",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n\s*\n|\n(?=\s*(?:[-*]\s|\(?[A-J][).:]))")


@dataclasses.dataclass(frozen=True)
class Statement:
    """What the text says of `letters`: `says` is "is", "is not", "open" (it is one of them) or "named".

    `weight` is 3 for a statement about the answer or choice, 2 for one about the single false statement, and 1 if a
    letter is only called true, correct, false or the like. `rethought`: the text between the previous statement and
    this one retracts something ("wait", "actually").
    """

    letters: list[str]
    says: str
    weight: int = 3
    rethought: bool = False


def statements(text: str, letters: list[str]) -> list[Statement]:
    """The statements in the last `MAX_CHARS` characters, in order; letters in a list share one statement."""
    text = text[-MAX_CHARS:]
    found, last = [], 0
    for group, start, end in _groups(text, letters):
        rethought = _RETRACTED.search(text, last, start) is not None
        found.append(dataclasses.replace(_statement(text, group, start, end), rethought=rethought))
        last = end
    return found


def _groups(text: str, letters: list[str]) -> list[tuple[list[str], int, int]]:
    """Letters joined by commas, `and` or `or`, with their start and end positions."""
    groups: list[list[re.Match[str]]] = []
    for match in _MENTION.finditer(text):
        if _letter(match) not in letters or not _is_mention(text, match):
            continue
        end = groups[-1][-1].end() if groups else -_GAP_CHARS
        joined = match.start() - end < _GAP_CHARS and _JOIN.fullmatch(text, end, match.start())
        if joined and match["small"] is None:
            groups[-1].append(match)
        else:
            groups.append([match])
    parts = [part for group in groups for part in _clauses(text, group)]
    return [([_letter(match) for match in part], part[0].start(), part[-1].end()) for part in parts]


def _letter(match: re.Match[str]) -> str:
    return (match["parenthesised"] or match["bare"] or match["small"]).upper()


def _clauses(text: str, group: list[re.Match[str]]) -> list[list[re.Match[str]]]:
    """A list of letters, split where another clause begins: "the answer is C and D is not", "it is: C, D fails"."""
    if len(group) < 2 or not _VERB.match(text, group[-1].end()):
        return [group]
    join = _JOIN.fullmatch(text, group[0].end(), group[1].start())
    assert join is not None  # `_groups` joined them
    if join["or"] or not _STATED.search(text[max(0, group[0].start() - _BEFORE_CHARS) : group[0].start()]):
        return [group]
    return [group[:1], group[1:]]


def _is_mention(text: str, match: re.Match[str]) -> bool:
    before = text[max(0, match.start() - _BEFORE_CHARS) : match.start()]
    if match["small"] is not None:
        return _says_answer(before)
    if match["bare"] in ("A", "I"):
        return _NO_ARTICLE.match(text, match.end()) is not None or _says_answer(before)
    return True


def _says_answer(before: str) -> bool:
    """Whether the text ends in "answer is" or the like."""
    return _SAID.search(before) is not None


def _statement(text: str, letters: list[str], start: int, end: int) -> Statement:
    before = text[max(0, start - _BEFORE_CHARS) : start]
    ends = list(_SENTENCE_END.finditer(before))
    # a heading and the letter below it belong together
    prefix = before[ends[-1].end() :] if ends and not _says_answer(before) else before
    suffix = text[end : end + _AFTER_CHARS]
    last = _SENTENCE_END.search(suffix)
    suffix = suffix if last is None else suffix[: last.start()]
    stated = _STATED.search(prefix) is not None
    if _DENIED_BEFORE.search(prefix):
        return Statement(letters, "is not", 3 if _NEGATED_BEFORE.search(prefix) else 1)
    if (_DENIED_DIRECTLY if stated else _DENIED_AFTER).match(suffix):
        return Statement(letters, "is not", 3 if stated or _NOT_THE_ANSWER.match(suffix) else 1)
    named_only = bool(_NAMED_ONLY.search(prefix) and suffix.strip(" .*_)}$\\")) and not _REASON.match(suffix)
    if len(set(letters)) > 1 or _OPEN_BEFORE.search(prefix):
        return Statement(letters, "open" if _says_answer(prefix) and not named_only else "named")
    weight = _affirmed(prefix, suffix, stated=stated, named_only=named_only)
    return Statement(letters, "is", weight) if weight else Statement(letters, "named")


def _affirmed(prefix: str, suffix: str, *, stated: bool, named_only: bool) -> int:
    """The weight with which the text calls a letter between `prefix` and `suffix` right; 0 if it does not."""
    but = _BUT.search(prefix) and not suffix.strip(" .*_)")
    if stated or _SAID_BEFORE.search(prefix) or _CHOSEN.search(prefix) or but or _THE_ANSWER_AFTER.match(suffix):
        return 3
    if _FALSE_ONE.search(prefix):
        return 2
    if _AFFIRMED_AFTER.match(suffix):
        return 1
    if named_only or not _AFFIRMED_BEFORE.search(prefix) or _NAMED_ANSWER.search(prefix) and _VERB.match(suffix):
        return 0
    # "so B", but "so A holds" only says something of A
    return 1 if re.match(r"[)*_\]}$\s]*[a-z]", suffix) and not _REASON.match(suffix) else 3
