"""A tokenizer that SGLang would load three times is, loaded once, the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.utils.hf_transformers import tokenizer as module  # noqa: E402

from runtime_cpu.plugins.sglang_cpu import tokenizers  # noqa: E402
from testkit.server import TINYLM  # noqa: E402
from testkit.workload import ASSETS  # noqa: E402

HOOKED = ("_auto_tokenizer_from_pretrained", "_resolve_tokenizers_backend")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was loaded as SGLang's own functions load; the hooks are on, and gone with the test."""
    counted: list[str] = []

    def counting(name: str) -> Any:
        own = getattr(module, name)

        def load(*args: Any, **kwargs: Any) -> Any:
            counted.append(name)
            return own(*args, **kwargs)

        return load

    for name in HOOKED:
        monkeypatch.setattr(module, name, counting(name))
    tokenizers.load()
    return counted


def test_it_is_the_one_that_sglang_would_take(loads: list[str]) -> None:
    once = module.get_tokenizer(str(TINYLM))
    assert loads == [HOOKED[0]]
    thrice = module._load_tokenizer_by_declared_class(str(TINYLM), use_fast=False)
    assert type(once) is type(thrice)
    assert once.get_vocab() == thrice.get_vocab()
    assert once.special_tokens_map == thrice.special_tokens_map
    assert once.chat_template == thrice.chat_template
    paths = [path for path in sorted((ASSETS / "text").rglob("*")) if path.is_file()][::40]
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")[:20_000]
        tokens = once.encode(text)
        assert tokens == thrice.encode(text)
        assert once.decode(tokens) == thrice.decode(tokens)


def test_one_of_another_class_is_looked_for(loads: list[str], tmp_path: Path) -> None:
    for path in TINYLM.glob("*token*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_bytes((TINYLM / "config.json").read_bytes())
    named = tmp_path / "tokenizer_config.json"
    named.write_text(json.dumps({**json.loads(named.read_text()), "tokenizer_class": "Unknown"}))
    module.get_tokenizer(str(tmp_path))
    assert loads == list(HOOKED)


def test_hooking_twice_hooks_once(loads: list[str]) -> None:
    tokenizers.load()
    module.get_tokenizer(str(TINYLM))
    assert loads == [HOOKED[0]]
