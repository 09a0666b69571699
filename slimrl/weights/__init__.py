"""Weights: loader, converters and weight updates, all based on one parameter mapping per model family.

Every Hugging Face tensor is read or written exactly once, in any tensor-parallel layout. Imports neither Megatron nor
SGLang: models are passed in as modules, servers as small protocols.
"""
