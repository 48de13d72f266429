"""Stand-in for IPython, of which SGLang imports two names for notebooks."""
