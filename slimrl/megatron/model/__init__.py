"""The model on a training rank. Custom model functions can call `policy_model` and `own_layers` (docs/hooks.md)."""

from slimrl.megatron.model.model_builder import own_layers, policy_model

__all__ = ["own_layers", "policy_model"]
