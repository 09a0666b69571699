"""Ray's page of text about a process that it ended because the machine ran out of memory, as one sentence.

Used by the supervisor, whose messages end in the summary and on the terminal.
"""

from __future__ import annotations

import re

_SIGNS = ("running low on memory", "due to memory pressure (OOM)")
_NODE = re.compile(r"Memory on the node \(IP: ([^,]+), ID: [^)]*\) was ([\d.]+) ?GB used / ([\d.]+) ?GB limit")
_PROCESS = re.compile(r"pid=(\d+), actual memory used=([\d.]+) ?GB")
_MEND = (
    "give the machine more memory, or start fewer or smaller processes on it (--dry-run shows what each slot needs);"
    " Ray's limit is RAY_memory_usage_threshold"
)


class OutOfMemoryEnd(RuntimeError):
    """Ray ended a process for the machine's memory."""


def brief(error: Exception) -> Exception:
    """`error`, or OutOfMemoryEnd with a sentence where it is Ray's page about the machine's memory.

    The numbers are left out where Ray says them in other words.
    """
    text = str(error)
    if not any(sign in text for sign in _SIGNS):
        return error
    node, process = _NODE.search(text), _PROCESS.search(text)
    who = f"process {process[1]}, which had {float(process[2]):.1f} GB," if process else "it"
    where = f": {float(node[2]):.1f} of the {float(node[3]):.1f} GB of machine {node[1]} were in use" if node else ""
    return OutOfMemoryEnd(f"Ray ended {who} for want of memory{where}; {_MEND}")
