"""Everything that touches SGLang and its router.

The engine runs as its own process (`server`, `router`, with `cpu` where there is no GPU) and is spoken to over HTTP
(`client` for generation, `control` for weights and caches). Only `cpu`, inside the server's process, imports sglang.
"""
