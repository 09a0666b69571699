"""The process that grades answers by rule; started by the grader pool.

Reads one JSON request `{"rule", ...}` per line and replies `{"value": ...}` or `{"error": str}`. An adversarial answer
may make it hang or use too much memory: the pool enforces a time limit, the kernel a memory limit. Computer algebra is
loaded when the first answer needs it, and announced to the pool, because loading takes longer than the time limit.
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
    """Processes requests until the input closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a busy grader must not outlive a killed parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    from slimrl.rollout.rm_hub import rule_graders

    rule_graders.load_graders()
    algebra = _Algebra(lambda notice: print(json.dumps(notice), file=replies))
    print(json.dumps({"ready": True}), file=replies)
    reply: dict[str, Any]
    for line in sys.stdin.buffer:
        try:
            reply = {"value": rule_graders.grade(json.loads(line), algebra)}
        except MemoryError:
            reply = {"error": f"MemoryError: the answer needs more than {MEMORY_LIMIT_BYTES >> 20} MiB"}
        except Exception as error:  # a library may raise anything on an adversarial answer
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=replies)


class _Algebra:
    """`algebra.equal`, imported at its first use."""

    def __init__(self, notify: Callable[[dict[str, Any]], None]) -> None:
        self._notify = notify
        self._equal: Callable[[str, str], bool] | None = None

    def __call__(self, answer: str, label: str) -> bool:
        if self._equal is None:
            self._notify({"loading": True})
            from slimrl.rollout.rm_hub.math_equivalence import sympy_equal as algebra

            algebra.warm_up()
            self._equal = algebra.equal
            self._notify({"loaded": True})
        return self._equal(answer, label)


if __name__ == "__main__":
    main()
