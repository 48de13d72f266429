"""Answers that are compared with plain SGLang's, bit for bit, while nothing else runs.

Each set of probes is asked under an `extra_key` of its own, so that its pages are computed once and
one behind the other. A later answer is compared where it found all of them, or none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bench.core.case import CaseFailedError
from bench.faults.prompts import PAGE_TOKENS, PROMPT_PAGES, Answer, PromptSource, References, ask
from bench.soak.world import World
from testkit.requests import flush_device
from testkit.server import Server

_NUM_PROMPTS = 2


@dataclass
class Probes:
    """Prompts with their answers by model.

    Attributes:
        prompts: the prompts.
        references: plain SGLang's answers by the model's name.
        reused: prompt tokens of all answers that came from a tier, by tier.
        num_compared: answers that were compared.
    """

    prompts: list[list[int]]
    references: dict[str, References]
    reused: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0

    @classmethod
    def learn(cls, world: World) -> Probes:
        """Asks plain SGLang with each model, computed and behind its own pages."""
        prompts = PromptSource(17).take(_NUM_PROMPTS)
        servers = {model: world.plain(model).start() for model in world.models}
        try:
            references = {
                model: References(server.wait_ready()) for model, server in servers.items()
            }
            for known in references.values():
                known.learn(prompts, [])
        finally:
            for server in servers.values():
                server.kill()
        return cls(prompts, references)

    def new(self, server: Server, model: str, key: str) -> None:
        """Asks under a key that was never used: computed, from the device, and from the tiers."""
        for expected in (0, PROMPT_PAGES):
            for prompt in self.prompts:
                answer = self._compared(server, prompt, model, key)
                if answer.cached_tokens != expected * PAGE_TOKENS:
                    raise CaseFailedError(
                        f"expected {expected} pages reused under the new key {key}, got "
                        f"{answer.cached_tokens} tokens"
                    )
        flush_device(server)
        self.again(server, model, key)

    def again(self, server: Server, model: str, key: str) -> None:
        """Asks under a key that was used: what of it is stored is reused."""
        for prompt in self.prompts:
            self._compared(server, prompt, model, key)

    def _compared(self, server: Server, prompt: list[int], model: str, key: str) -> Answer:
        answer = ask(server, prompt, extra_key=key)
        self.reused.update(answer.by_tier)
        if answer.cached_tokens not in (0, PROMPT_PAGES * PAGE_TOKENS):
            return answer
        if not self.references[model].agree(prompt, answer):
            raise CaseFailedError(
                f"an answer under the key {key} is not plain SGLang's with the model {model}: "
                f"{answer}"
            )
        self.num_compared += 1
        return answer
