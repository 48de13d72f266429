"""Hooks: what runs around SGLang's own functions, in the front process and in the scheduler.

Only the entry point imports them.
"""
