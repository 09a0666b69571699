"""The process that decides with computer algebra whether two answers are equal; started by the grader pool.

Reads one JSON request `{"answer", "label"}` per line and answers `{"equal": bool}` or `{"error": str}`. It may
hang or swallow memory on a hostile answer: the pool kills it on a time limit, the kernel on a memory limit.
"""

from __future__ import annotations

import ctypes
import json
import logging
import resource
import signal
import sys

MEMORY_LIMIT_BYTES = 4 << 30


def main() -> None:
    """Answers requests until the input closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a busy worker must not outlive a killed parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    sys.set_int_max_str_digits(0)
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    whole_text = [LatexExtractionConfig(boxed_match_priority=0)]

    def equal(answer: str, label: str) -> bool:
        parsed = [
            parse(f"\\boxed{{{text}}}", whole_text, parsing_timeout=None, raise_on_error=True)
            for text in (label, answer)
        ]
        return bool(all(parsed) and verify(*parsed, timeout_seconds=None, raise_on_error=True))

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            reply = {"equal": equal(**json.loads(line))}
        except Exception as error:  # whatever the library makes of a hostile answer is the answer's failure
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
