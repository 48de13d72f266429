"""What single models need of this runtime, beside attention and states."""
