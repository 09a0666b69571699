"""The process that judges answers by rule; started by the grader pool.

Reads one JSON request `{"rule", ...}` per line and answers `{"value": ...}` or `{"error": str}`. It may hang or
swallow memory on a hostile answer: the pool kills it on a time limit, the kernel on a memory limit. Computer algebra
is loaded when the first answer needs it, and told, because loading takes longer than grading may.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY_LIMIT_BYTES = 2 << 30


def main() -> None:
    """Answers requests until the input closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a busy grader must not outlive a killed parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not be between the replies
    from slimrl.rollout.rm_hub import rule_graders

    rule_graders.load_graders()
    algebra = _Algebra(lambda notice: print(json.dumps(notice), file=replies))
    print(json.dumps({"ready": True}), file=replies)
    reply: dict[str, Any]
    for line in sys.stdin.buffer:
        try:
            reply = {"value": rule_graders.judge(json.loads(line), algebra)}
        except MemoryError:
            reply = {"error": f"MemoryError: the answer needs more than {MEMORY_LIMIT_BYTES >> 20} MiB"}
        except Exception as error:  # whatever a library makes of a hostile answer is the answer's failure
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=replies)


class _Algebra:
    """`algebra.equal`, imported at its first use."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._equal: Callable[[str, str], bool] | None = None

    def __call__(self, answer: str, label: str) -> bool:
        if self._equal is None:
            self._tell({"loading": True})
            from slimrl.rollout.rm_hub.math_equivalence import sympy_equal as algebra

            algebra.warm_up()
            self._equal = algebra.equal
            self._tell({"loaded": True})
        return self._equal(answer, label)


if __name__ == "__main__":
    main()
