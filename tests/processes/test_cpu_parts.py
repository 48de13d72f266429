"""Models made of other models find these by name, without an import of all that there are."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from runtime_cpu.plugins.sglang_cpu.models.parts import names_of
from testkit.server import ROOT


def test_names_are_those_of_the_classes() -> None:
    """In a process of its own: some of transformers' models warn when they are imported."""
    code = """
from transformers import AutoModel, AutoModelForCausalLM, MistralConfig, PixtralVisionConfig
from runtime_cpu.plugins.sglang_cpu.models.parts import names_of
for auto, config in (
    (AutoModel, PixtralVisionConfig), (AutoModel, MistralConfig),
    (AutoModelForCausalLM, MistralConfig),
):
    print(names_of(auto)[config.__name__], auto._model_mapping[config].__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in found] == [
        "PixtralVisionModel",
        "MistralModel",
        "MistralForCausalLM",
    ]
    assert all(name == of_class for name, of_class in found)


def test_of_several_types_with_one_configuration_the_last_with_a_model_counts() -> None:
    class Own:
        pass

    class OwnModel:
        pass

    mapping = SimpleNamespace(
        _config_mapping={"a": "Shared", "b": "Shared", "c": "Alone", "d": "Lost", "e": "Lost"},
        _reverse_config_mapping={"Shared": "b", "Alone": "c", "Lost": "e"},
        _model_mapping={"a": "First", "b": "Second", "c": ("One", "Two"), "d": "Kept"},
        _extra_content={Own: OwnModel},
    )
    assert names_of(SimpleNamespace(_model_mapping=mapping)) == {
        "Shared": "Second", "Alone": ("One", "Two"), "Lost": "Kept", "Own": "OwnModel",
    }  # fmt: skip
