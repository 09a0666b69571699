"""Models that SGLang has no class for. A server of one of them imports this package (`server.model_environment`)."""
