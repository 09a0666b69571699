"""A helper next to a user's module, importable because their folder is on the path."""

import re


def last_digit(text):
    found = re.findall(r"\d", text)
    return found[-1] if found else None
