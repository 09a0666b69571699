"""Weights: one table of tensor names per model family, used by loader, converters and weight sync alike.

Promises that every Hugging Face tensor is read or written exactly once, whatever the tensor-parallel
layout. Imports neither Megatron nor SGLang: models come in as modules, servers as small protocols.
"""
