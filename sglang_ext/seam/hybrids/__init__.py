"""Hybrid models: where a prompt can be resumed, and what is saved for that.

Of models with window layers, `window_pages.py`; of those with a state a sequence, `state_pages.py`.
What a remote store is asked for either: `place_questions.py`.
"""
