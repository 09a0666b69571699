"""Model flags against a Hugging Face config.json: a wrong shape or theta trains without any error otherwise.

One declarative table per family says which key states which flag; nothing heavy is imported. Called by the rules,
by the plan, and by whoever needs a model's flags from its config.json.
"""

from __future__ import annotations

from slimrl.arguments.hf_config.compare import disagreements
from slimrl.arguments.hf_config.tables import MODEL_TYPES, stated_flags

__all__ = ["MODEL_TYPES", "disagreements", "stated_flags"]
