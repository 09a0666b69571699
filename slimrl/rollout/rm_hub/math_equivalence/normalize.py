"""Normalizes the spelling of answers: Unicode, LaTeX layout, delimiters, obsolete commands, and answers in words.

Takes linear time and never changes the meaning. Answers in words are choices, names, yes and no, number words, and
sentences for "there is none" (`as_words`).
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∗": "*", "÷": "/", "∕": "/",
    "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ", "⩾": "\\ge ", "≠": "\\ne ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "∖": "\\setminus ", "±": "\\pm ",
    "∓": "\\mp ", "°": "^\\circ ", "≈": "\\approx ", "√": "\\sqrt ", "∛": "\\sqrt[3] ", "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "α": "\\alpha ",
    "β": "\\beta ", "γ": "\\gamma ", "δ": "\\delta ", "θ": "\\theta ", "λ": "\\lambda ", "μ": "\\mu ",
    "σ": "\\sigma ", "φ": "\\phi ", "ϕ": "\\phi ", "ω": "\\omega ", "⟨": "\\langle ", "⟩": "\\rangle ",
    "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "∣": "|", "′": "'", "’": "'",
    "…": "\\ldots ", "‰": "\\permil ",
}  # fmt: skip
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₊₋"
_TRANSLATED = str.maketrans(_SYMBOLS)
_PLAIN_SCRIPT = str.maketrans(_SUPERSCRIPTS + _SUBSCRIPTS, "0123456789+-n" + "0123456789+-")
_SUPERSCRIPT = re.compile(f"[{_SUPERSCRIPTS}]+")
_SUBSCRIPT = re.compile(f"[{_SUBSCRIPTS}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")

_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_LAYOUT = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:left|right)(?![a-zA-Z])|\\[bB]igg?[lrm]?(?![a-zA-Z])"
    r"|\\(?:displaystyle|textstyle|limits|nolimits|mathstrut|strut|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])|\\!|\\/"
)
_SPACING = re.compile(
    r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|enspace|thinspace|hfill)(?![a-zA-Z])"
    r"|\\[hv]?(?:space\*?|phantom)\{[^{}]*\}|\s+"
)
_GAP_IN_NUMBER = re.compile(r"(?<=\d)(?:\\,|\\ |~|\{,\}|\{\\,\}|\\!|,\\!|\s)(?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,/])\d{1,3}(?:(?:\\,|\\ |~|\\;| )\d{3})+(?![\d/])")
_DOTTED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.,])")
_MARKED_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\{\\,\}|,\\!\s*|\\,)(?=\d{3}(?!\d))")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,}])(\d+)\{,\}(\d{1,2}(?!\d)|\d{4,})|(?<![\d.,}])0\{,\}(\d+)")
# `$25$ km`, `\(3\) and \(4\)`: inline mathematics, whose delimiters have no meaning
_INLINE = re.compile(r"(?<!\\)\$([^$]*?)(?<!\\)\$|(?<!\\)\\\(((?:(?!\\[()]).)*)\\\)")
_CIS = r"\\(?:cis(?![a-zA-Z])|(?:operatorname|text|mathrm)\s*\{\s*cis\s*\})"
_ARGUMENT = r"(\([^()]*\)|\{[^{}]*\}|\\[dt]?frac\{[^{}]*\}\{[^{}]*\}|\d+(?:\.\d+)?(?:\s*\^\s*\{?\\circ\}?)?)"
_SCALES = {"million": 6, "billion": 9, "trillion": 12}


_ORDINAL = (
    r"(\d)\s*\^?\s*\{?\s*\\(?:text[a-z]*|mathrm|rm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?"
    r"|(1)\s*\^\s*(?:st\b|\{\s*st\s*\})|(2)\s*\^\s*(?:nd\b|\{\s*nd\s*\})|(3)\s*\^\s*(?:rd\b|\{\s*rd\s*\})"
    r"|(\d)\s*\^\s*(?:th\b|\{\s*th\s*\})"
)


def _ordinal(match: re.Match[str]) -> str:
    return "".join(digit or "" for digit in match.groups()) + "\\text{th}"


def _scale(match: re.Match[str]) -> str:
    return f"\\times 10^{{{_SCALES[match[1]]}}} "


_SYNONYMS = (
    (re.compile(r"\\(?:[dtc]frac|nicefrac|sfrac)(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\surd(?![a-zA-Z])"), r"\\sqrt "),
    (re.compile(r"\\(?:underline|uline|ensuremath)\s*(?=\{)"), ""),
    (re.compile(r"\\begin\s*\{(aligned|align\*?|gathered|equation\*?)\}((?:(?!\\\\)[^&])*)\\end\s*\{\1\}"), r"\2"),
    (re.compile(r"\\text\w*\s*\{\s*(?:\\?([$%])|([€£¥₹¢]))\s*\}"), r"\1\2"),
    (re.compile(r"\\(?:pounds|textsterling)(?![a-zA-Z])"), "£"),
    (re.compile(r"\\(?:euro|texteuro)(?![a-zA-Z])"), "€"),
    (re.compile(r"\\(?:yen|textyen)(?![a-zA-Z])"), "¥"),
    (re.compile(r"\\text\w*\s*\{\s*(Rs\.?|USD|EUR|GBP|INR|US\\?\$)\s*\}\s*(?=[\d.])"), r"\1 "),
    (re.compile(r"\\#\s*(?=\d)"), ""),
    (re.compile(r"\\ast(?![a-zA-Z])"), "*"),
    (re.compile(r"(?<=\d)\s*\\text\s*\{\s*[eE]\s*\}\s*\{?([+-]?\d+)\}?"), r"e\1"),
    (re.compile(r"\\text\w*\s*\{\s*(0[xX][0-9A-Fa-f]+)\s*\}"), r"\1"),
    (re.compile(_ORDINAL), _ordinal),
    (re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*)?\b(million|billion|trillion)\b\s*\}?"), _scale),
    (re.compile(r"(?<=\d)(\s*(?:\\text\s*\{\s*)?)([ap])\.\s?m\b\.?", re.IGNORECASE), r"\1\2m"),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}"), ""),
    (re.compile(rf"{_CIS}\s*{_ARGUMENT}"), r"(\\cos(\1)+i\\sin(\1))"),
    (re.compile(r"\^\{?(\d+)\}?\s*/\s*_\{?(\d+)\}?"), r"\\frac{\1}{\2}"),
    (re.compile(r"\bper\s+cent\b"), "percent"),
    (re.compile(r"\\(?:leq|leqslant|lt\s*=)(?![a-zA-Z])"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge "),
    (re.compile(r"\\neq(?![a-zA-Z])|\\not\s*="), r"\\ne "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\(?:varnothing|empty)(?![a-zA-Z])"), r"\\emptyset "),
    (re.compile(r"\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\(?:lbrace)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\(?:lbrack)(?![a-zA-Z])"), "["),
    (re.compile(r"\\(?:rbrack)(?![a-zA-Z])"), "]"),
    (re.compile(r"\\(?:imath|jmath)(?![a-zA-Z])"), "i"),
    (re.compile(r"\\(?:bold|mathbf|boldsymbol|bm|mathrm|mathit|mathsf|rm|bf)\s*\{([A-Za-z0-9+\-.,\s]{1,2})\}"), r"\1"),
    (re.compile(r"\\(?:mathbf|boldsymbol|bm|mathrm|textnormal|textup)\s*\{([\d.,/\s+-]+)\}"), r"\1"),
    (re.compile(r"\\text\w*\s*\{([\d.,/\s+-]+)\}"), r"\1"),
    (re.compile(r"\\(?:textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|mathrm|mathbf|emph)\s*\{"), r"\\text{"),
    (re.compile(r"\\[lc]?dots[bcmi]?(?![a-zA-Z])"), r"\\ldots "),
    (re.compile(r"(?:\{\})?[_^]\{?(\w+)\}?\s*C\s*_\s*\{?(\w+)\}?"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?<![\w\\])(\d+)\s*C\s*(\d+)(?!\w)"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}"), r"\\text{\1/\2}"),
    (re.compile(r"(\\text\{[^{}]*[a-zA-Z])\^\{-(\d)\}\s*\}$"), r"\1^-\2}"),
    (re.compile(r"\\text\{([^{}]*?\S)\s+(and|or)\s*\}"), r"\\text{\1}\\text{ \2 }"),
    (re.compile(r"\\math(?:cal|scr|frak)\s*\{?([A-Z])\}?"), r"\1"),
    (re.compile(r"\\R(?![a-zA-Z])"), r"\\mathbb{R}"),
    (re.compile(r"\\(?:percent)(?![a-zA-Z])"), "%"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s*([a-zA-Z])\s*([a-zA-Z0-9])(?![a-zA-Z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*([\da-zA-Z])"), r"\\frac\1{\2}"),
    (re.compile(r"\\frac\s+\{"), r"\\frac{"),
    (re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d+(?:\.\d+)?|[a-zA-Z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*\(([^()]*)\)"), r"\\sqrt\1{\2}"),
    (re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\a-zA-Z])sqrt\s*(\d+|\{)"), r"\\sqrt \1"),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![\\a-zA-Z])(?:[iI]nfinity|infty|inf|oo)(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"(?<![\\a-zA-Z{])(sin|cos|tan|ln|log|exp|arcsin|arccos|arctan)(?=\s*\(|\s+\d|\s+\w\b)"), r"\\\1 "),
    (re.compile(r"<\s*="), r"\\le "),
    (re.compile(r">\s*="), r"\\ge "),
    (re.compile(r"!\s*="), r"\\ne "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\{\s*\{([^{}]*)\}\s*\\over\s*\{([^{}]*)\}\s*\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\^\{(\w)\}"), r"^\1"),
    (re.compile(r"_\{(\w)\}"), r"_\1"),
)  # fmt: skip
_QUALIFIER = re.compile(
    r"(?<=\S)\s*,?\s*(?:\\text\s*\{[^{}]*\}\s*|where\s+|for\s+)?[a-zA-Z]\s*\\in\s*\\mathbb\s*\{?[ZNQRC]\}?(?:\^\+|_\+)?$"
)
_WHOLE_LIST = re.compile(r"\\text\s*\{((?:[^{}]*(?:,|\band\b|\bor\b)|\s*[-+$]?\.?\d)[^{}]*)\}")
# most answers have no LaTeX command, so that half of the rules can be skipped
_RULES = tuple((pattern, replacement, pattern.pattern.startswith("\\\\")) for pattern, replacement in _SYNONYMS)
_TIDY = (
    (re.compile(r"\s*([+\-*/=<>,;()\[\]{}^_|%!])\s*"), r"\1"),
    (re.compile(r"(\\[a-zA-Z]+)\s+(?=[^a-zA-Z])"), r"\1"),
)
_LEAD = re.compile(
    r"(?:so |thus |therefore |hence )?,?\s*(?:the )?(?:final |correct |exact )?(?:answer|result|solution)(?: is|:|=)"
    r"\s*:?\s*|(?:about|approximately|approx\.?|roughly|around)\s+(?=[\d\\$.-])|=\s*(?=\S)"
    r"|\\sim\s*(?=[\d.-])|(?:#|no\.|number)\s*(?=\d)",
    re.IGNORECASE,
)
_TEXT_LEAD = re.compile(r"\\text\s*\{\s*([^{}]*?(?:is|are|:|=)\s*:?)\s*\}\s*(?=\S)")
_MARKDOWN = re.compile(r"(\*\*|\*|`|\"|'')(?=\S)(.*?\S)\1", re.DOTALL)
_LOOSE_END = re.compile(r"(?:\\?\s|\\\\|(?<!\\)\\$|(?<!\\)[.,;])+$")
_ARC = re.compile(
    r"(\d+)\s*\^\s*\{?\\circ\}?\s*(\d+)\s*(?:\^\s*\{?\\prime\}?|'(?!'))(?:\s*(\d+)\s*(?:''|\"|\^\s*\{?\\prime\s*\\prime\}?))?"
)


def clean(text: str) -> str:
    """`text` with one spelling per symbol and single spaces, still valid LaTeX.

    Removes delimiters and boxes around the whole text, and spaces around operators.
    """
    text = _unwrapped(_from_unicode(text))
    if "$" in text or "\\(" in text:
        text = _INLINE.sub(lambda match: f" {match[1] or match[2] or ''} ", text).strip()
    if "{,}" in text:
        text = _DECIMAL_COMMA.sub(lambda match: f"{match[1] or 0}.{match[2] or match[3]}", text)
    text = _SPACED_THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _MARKED_THOUSANDS.sub("", text)
    if text.count(".") > 1:
        text = _DOTTED_THOUSANDS.sub(lambda match: match[0].replace(".", ""), text)
    if "circ" in text:
        text = _ARC.sub(_degrees, text)
    text = _SPACING.sub(" ", _LAYOUT.sub("", text))
    for pattern, replacement, of_commands in _RULES:
        # a failed search is cheaper than a substitution without a match
        if (not of_commands or "\\" in text) and pattern.search(text):
            text = pattern.sub(replacement, text)
    if re.search(r"[<>=]|\\[lg]e(?![a-zA-Z])", text):
        text = re.sub(r"\\l(and|or)(?![a-zA-Z])", r" \1 ", text)
    text = _unwrapped(text)
    lead = _LEAD.match(text) or _text_lead(text)
    if lead is not None:
        text = _unwrapped(text[lead.end() :])
    whole = _WHOLE_LIST.fullmatch(text)
    if whole is not None:
        text = whole[1].strip()
    if "\\mathbb" in text and not text.startswith("\\{"):
        text = _QUALIFIER.sub("", text)
    return text


def tight(text: str) -> str:
    """The output of `clean` without insignificant spaces, for comparing spellings."""
    for pattern, replacement in _TIDY:
        if pattern.search(text):
            text = pattern.sub(replacement, text)
    return text.strip()


def _unwrapped(text: str) -> str:
    while True:
        before = text
        text = text.strip() if text.rstrip().endswith("...") else _LOOSE_END.sub("", text).strip()
        marked = _MARKDOWN.fullmatch(text)
        if marked is not None and marked[1] not in marked[2]:
            text = marked[2]
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in inner.replace("\\$", "")
                and not inner.endswith("\\")
            ):
                text = inner.strip()
        box = _BOX.fullmatch(text)
        if box is not None:
            text = box[1]
        if text == before:
            return text


def _text_lead(text: str) -> re.Match[str] | None:
    """Matches `\\text{The answer is }` before the answer."""
    lead = _TEXT_LEAD.match(text)
    return lead if lead is not None and _LEAD.match(lead[1]) else None


def _from_unicode(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    text = _VULGAR.sub(_vulgar_fraction, text)
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_PLAIN_SCRIPT) + "}", text)
    text = _SUBSCRIPT.sub(lambda match: "_{" + match[0].translate(_PLAIN_SCRIPT) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATED)).translate(_TRANSLATED)
    return "".join(" " if character.isspace() else character for character in text if _is_shown(character))


def _is_shown(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) not in ("Cc", "Cf", "Co", "Cs", "Cn")


def _degrees(match: re.Match[str]) -> str:
    """Degrees, minutes and optional seconds of arc as a fraction of degrees."""
    degrees, minutes, seconds = (int(part or 0) for part in match.groups())
    return f"\\frac{{{3600 * degrees + 60 * minutes + seconds}}}{{3600}}^\\circ"


def _vulgar_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f"\\frac{{{numerator}}}{{{denominator}}}"


_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_MATH = re.compile(r"[\\^_=<>+*/{}|]")
_SEPARATORS = re.compile(r"(?:[\s,.;:!?'\"()\[\]`]|-(?!\d)|(?<=\w)-)+")  # keeps the sign of a number
_NO_WORDS = {"and", "sin", "cos", "tan", "log", "cot", "sec", "csc", "gcd", "lcm", "max", "min", "mod"}
_ARTICLES = {"a", "an", "the"}
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?(?:\(([A-Za-z])\)|([A-Z])(?=[.):]))[.):]*\s*(\S.*)?")
_NAMED_CHOICE = re.compile(r"(?:option|choice)\s+([A-Za-z])", re.IGNORECASE)
_PLAIN_CHOICE = re.compile(r"[A-Ja-j]")
_SAME = {
    "dne": "does not exist", "no solutions": "no solution", "no real solutions": "no solution",
    "no real solution": "no solution", "there is no solution": "no solution", "there are no solutions": "no solution",
    "none": "no solution", "none exist": "no solution", "none exists": "no solution",
    "it does not exist": "does not exist",
    "doesn t exist": "does not exist", "impossible": "impossible", "not possible": "impossible",
    "infinite": "infinitely many", "infinite number": "infinitely many", "half": "one half", "not defined": "undefined",
    "cannot be determined": "not enough information", "can not be determined": "not enough information",
    "all reals": "all real numbers", "empty set": "no solution",
}  # fmt: skip
_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10,
}  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def as_words(text: str) -> str | None:
    """The normalized words of an answer in words: without case, articles and punctuation. None for other answers.

    `text` is the output of `clean`.
    """
    marked = "\\text" in text
    plain = _TEXT.sub(r" \1 ", text)
    if _MATH.search(plain):
        return None
    words = [word for word in _SEPARATORS.split(plain.casefold()) if word]
    if len(words) > 1:
        words = [word for word in words if word not in _ARTICLES] or words
    if not any(_is_word(word) for word in words) and not (marked and any(_says_something(word) for word in words)):
        return None
    joined = " ".join(words).removeprefix("set of ")
    return _SAME.get(joined, joined)


def _is_word(word: str) -> bool:
    return (len(word) > 2 and word.isalpha() and word not in _NO_WORDS) or word in ("am", "pm")


def _says_something(word: str) -> bool:
    """Whether a word is neither a number nor a conjunction."""
    return word not in ("and", "or") and not word.lstrip("+-").isdecimal()


def plain(text: str) -> str:
    """The text without `\\text` commands, spaces and case."""
    return "".join(_TEXT.sub(r"\1", text).split()).casefold()


def choice(text: str) -> tuple[str, str] | None:
    """The letter of a multiple-choice answer such as `B`, `(B)`, `B.` or `(B) 5`, and the text after it."""
    shown = _TEXT.sub(r"\1", text).strip()
    if _PLAIN_CHOICE.fullmatch(shown):
        return shown.upper(), ""
    named = _NAMED_CHOICE.fullmatch(shown)
    if named is not None:
        return named[1].upper(), ""
    match = _CHOICE.fullmatch(shown)
    return None if match is None else ((match[1] or match[2]).upper(), (match[3] or "").strip())


def with_digits(words: str) -> str:
    """The words with a leading number in digits, `six feet` as `6 feet`."""
    parts = words.split()
    if parts[0] not in _ONES and parts[0] not in _TENS:
        return words
    for count in range(len(parts) - 1, 0, -1):
        value = number_word(" ".join(parts[:count]))
        if value is not None:
            return " ".join([str(value), *parts[count:]])
    return words


def number_word(words: str) -> Fraction | None:
    """The value of a number word up to 999,999; None if it is not a number word."""
    parts = words.split()
    part = _PARTS.get(parts[-1]) or _PARTS.get(parts[-1].removesuffix("s")) if len(parts) == 2 else None
    if part is not None and parts[0] in _ONES:
        return Fraction(_ONES.index(parts[0]), part)
    thousands, found, rest = words.partition(" thousand")
    if found:
        high, low = _below_thousand(thousands), _below_thousand(rest.strip()) if rest.strip() else Fraction(0)
        return None if high is None or low is None else 1000 * high + low
    return _below_thousand(words)


def _below_thousand(words: str) -> Fraction | None:
    hundreds, found, rest = words.partition(" hundred")
    if found:
        high, low = _below_hundred(hundreds), _below_hundred(rest.removeprefix(" and").strip() or "zero")
        return None if high is None or low is None or not 0 < high < 10 else 100 * high + low
    return _below_hundred(words)


def _below_hundred(words: str) -> Fraction | None:
    parts = words.split()
    if len(parts) == 1 and parts[0] in _ONES:
        return Fraction(_ONES.index(parts[0]))
    if parts and parts[0] in _TENS and len(parts) <= 2:
        ones = _ONES.index(parts[1]) if len(parts) == 2 and parts[1] in _ONES[1:10] else None
        if len(parts) == 1 or ones is not None:
            return Fraction(10 * (_TENS.index(parts[0]) + 2) + (ones or 0))
    return None
