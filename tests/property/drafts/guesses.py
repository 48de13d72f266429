"""A scheduler that decodes by guesses, of which some are right."""

from __future__ import annotations

from typing import Any

from tests.property.worlds.scheduler import Scheduler

MOST_GUESSES = 4


class Guessing(Scheduler):
    """Behind a prompt it verifies guesses; before a world among a class's bases.

    Attributes:
        num_rejected: guesses.
        keeps_rejected: the first rejected guess of a verification counts as verified: a mistake.
    """

    num_rejected = 0
    keeps_rejected = False

    def go_on(self, req: Any) -> bool:
        """As the world for a prompt; then guesses are verified."""
        start, page = req.prefix_len, self.cache.page_size
        if start < req.prompt_len or not req.num_new:
            return super().go_on(req)
        guesses = [self.rng.randrange(3) for _ in range(self.rng.randint(1, MOST_GUESSES))]
        end = start + len(guesses)
        self.slide(req)
        if end > req.kv.kv_allocated_len:
            rows = self.allocate(-(-end // page) * page - req.kv.kv_allocated_len)
            if rows is None:
                self.retract(req)
                return True
            self.write(req, req.kv.kv_allocated_len, rows)
            req.kv.kv_allocated_len += len(rows)
        said = list(req.tokens)
        req.tokens = [*said, *guesses]
        self.forward(req, start, end)
        num_right = self.rng.randint(1, min(len(guesses), req.num_new))
        req.tokens = [*said, *guesses[:num_right]]
        self.num_rejected += len(guesses) - num_right
        if num_right < len(guesses) and self.keeps_rejected:
            req.tokens.append((guesses[num_right] + 1) % 3)  # what the model says instead
            num_right += 1
        req.num_new = max(0, req.num_new - num_right)
        req.prefix_len = req.kv.kv_committed_len = start + num_right
        return True
