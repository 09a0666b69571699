"""All code specific to SGLang and its router.

The engine runs as a separate process (`server`, `router`; `cpu_patches` without a GPU) and is called over HTTP
(`client` for generation, `control` for weights and caches). Only code inside the server's process imports sglang.
"""
