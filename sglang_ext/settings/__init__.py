"""Settings: every knob once, its flag, and which SGLang and set-ups the plugin runs with.

Of the plugin it imports the errors, and what is known by id: codecs, and orders of eviction.
"""
