"""What all failures have in common that are no fault of the user's functions, also where those meet them.

Base of the errors of engines, graders and reward services; read by `failures`.
"""

from __future__ import annotations


class ServiceError(RuntimeError):
    """Something failed that slimrl itself runs or asks."""
