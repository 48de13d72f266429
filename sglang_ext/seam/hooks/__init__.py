"""Hooks: what runs around SGLang's own functions, in the front process and in the scheduler.

Only the entry point and the scheduler's own hooks import them.
"""
