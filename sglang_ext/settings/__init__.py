"""Settings: every knob once, its flag, and which SGLang and set-ups the plugin runs with.

It imports nothing of the plugin but the names of the codecs.
"""
