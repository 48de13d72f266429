"""What happens to a conversation that outgrows its context window: where to cut it, what to reuse.

`cut` decides which tokens of a prompt are kept, `marks` finds the places between messages, and
`rolling` finds stored text in a prompt by content. None of them imports torch or SGLang.
"""
