"""Coded pages in a remote store, and the streaming that brings them.

`remote_codec.py` codes pages in levels, `lookup.py` finds what a store has of a prefix, `run.py`
holds what has arrived of it, `streams.py` has the threads that fetch and decode as the planner of
`sglang_ext.streaming` says; they alone block on the store. How pages are uploaded is in
`sglang_ext.tiers.store.remote.coded_uploads`.
"""
