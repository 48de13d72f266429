"""What an operator asks of a running server, by its endpoints for administrators.

Of stored pages: `steering_endpoint.py` takes it in front, `steering_scheduler.py` does it. Of
SGLang's arguments: `changes.py` refuses in a scheduler what a start would have been refused with,
and `refused_changes.py` says so in front.
"""
