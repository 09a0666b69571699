"""Operators that replace those of SGLang in its server: attention on a CPU, and those of --true-on-policy-mode."""
