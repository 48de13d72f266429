"""Models made of other models find these by name, without an import of all that there are."""

from __future__ import annotations

from types import SimpleNamespace

from transformers import AutoModel, AutoModelForCausalLM, MistralConfig, Qwen2Config

from runtime_cpu.plugins.sglang_cpu.models.parts import names_of


def test_names_are_those_of_the_classes() -> None:
    for auto_class in (AutoModel, AutoModelForCausalLM):
        names = names_of(auto_class)
        for config in (MistralConfig, Qwen2Config):
            assert names[config.__name__] == auto_class._model_mapping[config].__name__
    assert names_of(AutoModel)["PixtralVisionConfig"] == "PixtralVisionModel"


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
