"""What is done about an error beside a transfer: the thread that met it goes on."""

from __future__ import annotations

from sglang_ext.tiers.failure_log import FailureLog
from sglang_ext.tiers.store.types import StoreCounters


def note_failure(counters: StoreCounters, failures: FailureLog, what: str) -> None:
    """Counts the error that is being handled, which nobody expected, and logs it.

    Args:
        counters: of the store.
        failures: of the module whose thread it is.
        what: what failed, as a sentence of the log.
    """
    counters.add("worker_failures")
    failures.exception(f"hier-kv: {what}")
