"""LoRA adapters in SGLang servers: the calls for them, their names in requests, and what servers need for them."""
