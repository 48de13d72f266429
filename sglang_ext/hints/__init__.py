"""What clients say of their conversations, and what an operator asks for of stored pages.

A request says when its conversation comes back, how long it may, that it is over, or that it is to
stay (`request_hints.py`, taken from its `custom_params`); `handing.py` hands that on. An operator
has prompts that nobody sent prefetched, demoted or pinned (`steering_request.py`; over HTTP:
`seam/hooks/admin/steering_endpoint.py`, done by `steering_scheduler.py` there). Both reach the
store by `LookAhead` (`tiers/store/lookahead.py`), and decide by `tiers/policy/hints/`.
"""
