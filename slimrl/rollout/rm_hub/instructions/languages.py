"""Which language a text is in, by py3langid, whose model for 97 languages comes with the package."""

from __future__ import annotations


def is_language(text: str, code: str) -> bool:
    """Whether the text is in the language of this ISO 639-1 code (`zh-cn` counts as `zh`).

    Raises ValueError where the code is not one of the languages that can be told.
    """
    import py3langid  # 5 MB of model: only for the few samples that ask about a language

    code = code.casefold().split("-")[0]
    if code not in {language for language, _ in py3langid.rank("")}:
        raise ValueError(f"the language {code!r} is not known: give an ISO 639-1 code such as 'en'")
    # capitals are rare in what the model has seen
    return py3langid.classify(text.lower())[0] == code
