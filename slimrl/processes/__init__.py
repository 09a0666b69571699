"""Long-lived child processes (training ranks, SGLang servers, the router): started, watched and ended as one.

Guarantees that no descendant of a child outlives the parent, however either of them ends. Independent of engines.
"""

from slimrl.processes.child_process import POLL_INTERVAL_S, ManagedProcess, ProcessStartError, importable

__all__ = ["POLL_INTERVAL_S", "ManagedProcess", "ProcessStartError", "importable"]
