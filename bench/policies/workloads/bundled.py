"""The trace that comes with the repository."""

from __future__ import annotations

from bench.core.case import ROOT

BUNDLED = ROOT / "tests" / "assets" / "traces" / "mooncake-conversation.jsonl.xz"
