"""Settings: every knob once, its flag, and which SGLang and set-ups the plugin runs with.

Every room of the plugin may import it. It imports none, but for the names of the codecs.
"""
