"""What `hier-kv doctor` looks at: SGLang, and the machine with its speeds."""
