"""The server's side of --true-on-policy-mode on a CPU: SGLang's layers compute with the operators of the trainer."""
