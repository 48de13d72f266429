"""The case `policies`: simulations, replays and optima of the queue's look-ahead."""
