"""Child processes that serve (training ranks, SGLang servers, the router): started, watched and ended as one.

Promises that nothing of a child outlives its parent, however either of them ends. Called by the rooms that start
processes; knows no engine.
"""

from slimrl.processes.managed_process import POLL_INTERVAL_S, ManagedProcess, ProcessStartError, importable

__all__ = ["POLL_INTERVAL_S", "ManagedProcess", "ProcessStartError", "importable"]
