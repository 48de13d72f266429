"""Hybrid models: where a prompt can be resumed, and what is saved for that.

Of models with window layers, `window_pages.py`, and `window_questions.py` to a remote store; of
those with a state a sequence, `state_pages.py`.
"""
