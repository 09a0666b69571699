"""A helper beside a user's module, found because their folder is importable."""

import re


def last_digit(text):
    found = re.findall(r"\d", text)
    return found[-1] if found else None
