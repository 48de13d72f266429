"""What the front process names images by, with SGLang's own items."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.managers.schedule_batch import (  # noqa: E402
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalProcessorOutput,
)

from sglang_ext.identity.media import CARRIER, FIRST_PAD, content_digest  # noqa: E402
from sglang_ext.seam.hooks.media import around_tokenizing_one  # noqa: E402
from sglang_ext.seam.media.requests import _proved  # noqa: E402
from sglang_ext.settings.images import NAMEABLE_IMAGES  # noqa: E402

SECRET = "s" * 64
SPAN = (3, 8)


def image(**fields: Any) -> MultimodalDataItem:
    values = {
        "modality": Modality.IMAGE,
        "feature": torch.arange(48, dtype=torch.float32).reshape(6, 8),
        "offsets": [SPAN],
        "model_specific_data": {"image_grid_thw": torch.tensor([[1, 4, 6]])},
    }
    return MultimodalDataItem(**values | fields)


def named(
    *items: MultimodalDataItem, architecture: str = NAMEABLE_IMAGES[0], **request: Any
) -> MultimodalProcessorOutput:
    """What the hook makes of a request with these images."""
    tokens = list(range(12))
    padded = MultimodalProcessorOutput.build_padded_input_ids(tokens, list(items))
    inputs = MultimodalProcessorOutput(
        mm_items=list(items), input_ids=tokens, padded_input_ids=padded
    )
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    args = SimpleNamespace(_hier_kv_secret=SECRET)
    manager = SimpleNamespace(model_config=config, server_args=args)

    async def tokenize(self: Any, obj: Any) -> Any:
        return SimpleNamespace(mm_inputs=inputs)

    obj = SimpleNamespace(**{"mm_hashes": None} | request)
    found = asyncio.run(around_tokenizing_one(tokenize, manager, obj))
    assert found.mm_inputs is inputs
    return inputs


def test_an_image_goes_by_a_name_that_the_scheduler_believes() -> None:
    item, before = image(), image()
    before.set_hash(77)  # as SGLang's processors do, and clients that send hashes with tensors
    for each in (item, before):
        inputs = named(each)
        proved = _proved(each, SECRET)
        assert proved is not None
        details = {"image_grid_thw": torch.tensor([[1, 4, 6]])}
        assert proved.content == content_digest("IMAGE", each.feature, details)
        assert proved.spans == (SPAN,)
        assert len(set(proved.pads)) == 4
        assert all(pad >= FIRST_PAD for pad in proved.pads)
        assert _proved(each, "another") is None
        if inputs.padded_input_ids is not None:
            assert inputs.padded_input_ids[3:9] == [*proved.pads, *proved.pads[:2]]
    assert item.pad_values == before.pad_values


def test_a_carrier_of_a_clients_own_is_not_believed() -> None:
    item = image()
    item.model_specific_data[CARRIER] = b"x" * 32
    item.set_identity(b"y" * 32)
    assert _proved(item, SECRET) is None
    named(item)
    proved = _proved(item, SECRET)
    assert proved is not None
    assert proved.content != b"x" * 32


@pytest.mark.parametrize(
    ("fields", "request_fields"),
    [
        ({"modality": Modality.VIDEO}, {}),
        ({"modality": Modality.AUDIO}, {}),
        ({"format": MultimodalInputFormat.PROCESSOR_OUTPUT}, {}),
        ({"format": MultimodalInputFormat.PRECOMPUTED_EMBEDDING}, {}),
        ({"feature": object()}, {}),
        ({"feature": None}, {}),
        ({"precomputed_embeddings": torch.zeros(2)}, {}),
        ({"feature": None, "precomputed_embeddings": torch.zeros(2)}, {}),
        ({"feature": torch.zeros(2, device="meta")}, {}),
        ({"model_specific_data": {"what": object()}}, {}),
        ({}, {"mm_hashes": ["ab"]}),
        ({}, {"architecture": "Gemma3ForConditionalGeneration"}),
    ],
)
def test_what_is_left_as_sglang_has_it(
    fields: dict[str, Any], request_fields: dict[str, Any]
) -> None:
    """One such item is enough: then nothing of the request has a name of ours."""
    other, item = image(offsets=[(10, 11)]), image(**fields)
    named(other, item, **request_fields)
    for each in (other, item):
        assert each.identity is None
        assert CARRIER not in each.model_specific_data
        assert _proved(each, SECRET) is None


def test_a_client_may_not_send_numbers_of_images_as_tokens() -> None:
    """A batch with images would have one of their rows there, and all behind it off by one."""
    for tokens in ([5, FIRST_PAD], [FIRST_PAD + (1 << 61)]):
        with pytest.raises(ValueError, match="no token"):
            named(image(), input_ids=tokens)
    assert CARRIER in named(image(), input_ids=[5, FIRST_PAD - 1]).mm_items[0].model_specific_data
    named(image(), architecture="Other", input_ids=[FIRST_PAD])  # nothing of it is stored
    named(image(), input_ids=[[1], "no token"])  # SGLang says what is wrong with it
