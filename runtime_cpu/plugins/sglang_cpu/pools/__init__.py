"""What SGLang keeps of tokens and sequences, as on a GPU."""
