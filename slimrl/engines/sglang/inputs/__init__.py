"""Inputs of requests that SGLang's servers do not take as they are."""
