"""What is met of SGLang while a server starts: its flags, its front process, its ranks."""
