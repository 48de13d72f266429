"""Models with images beside Qwen2.5-VL: small ones, on the real server.

As in `test_images`, which has what does not depend on the model: a plain server of SGLang's says
what is right; of the plugin's, one is killed, and another one goes on with its disk.

By default one model, and InternVL's text with marks; the long form has all.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from testkit.images import glm_model, intern_model, pixtral_models
from testkit.images.vision_model import picture
from testkit.server import Server
from tests.e2e.hier_server import settled
from tests.e2e.images.image_prompts import (
    BASE,
    LARGE,
    PAGE,
    PLUGIN,
    TOLERANCE,
    Prompt,
    answers,
    ask,
    check_right,
    drop,
    host_size,
    is_refused,
    prompts,
    words,
)
from tests.e2e.models.hybrid_answers import cached, check_hits, values

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release]


@dataclass(frozen=True)
class Kind:
    """A model.

    Attributes:
        write: writes it into a new folder.
        placeholder: what an image is in the text.
    """

    write: Callable[[Path], Path]
    placeholder: str


KINDS = {
    "GLM-4V": Kind(glm_model.write_glm4v, glm_model.IMAGE),
    "InternVL": Kind(intern_model.write_internvl, intern_model.IMAGE),
    "Mistral 3": Kind(pixtral_models.write_mistral3, pixtral_models.IMAGE),
    "Pixtral": Kind(pixtral_models.write_pixtral, pixtral_models.IMAGE),
}


@pytest.mark.sampled("Pixtral")
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_images_come_back_from_dram_and_from_disk(kind: Kind, tmp_path: Path) -> None:
    """Bit for bit as they do from the device of plain SGLang; another image is another prompt."""
    model = str(kind.write(tmp_path / "model"))
    which = prompts(kind.placeholder)
    text = words(100, 70) + kind.placeholder + words(101, 60)
    alike = [Prompt(text, (picture(seed),)) for seed in range(200, 203)]
    with Server([*BASE, *LARGE], model=model, stop="kill") as plain:
        computed, hits = answers(plain, which), answers(plain, which)
        right = answers(plain, alike)
    (_, one), (_, other), _ = values(right)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10 * TOLERANCE
    tiers = ["--hier-kv-host-size", host_size(400), "--hier-kv-disk-dir", str(tmp_path / "disk")]
    hier = [*BASE, *PLUGIN, *LARGE, *tiers]
    with Server(hier, model=model, stop="kill") as server:
        check_right(answers(server, which), computed)
        assert values(answers(server, which)) == values(hits)
        check_right(answers(server, alike[:2]), right[:2])
        drop(server)
        check_hits(answers(server, which), hits, "host", above=1000)
        check_right(answers(server, alike[1::-1]), right[1::-1])
        host = settled(server)["host"]
    assert host["image_requests"] == 3 * len(which) + 4
    assert not host.get("unnamed_image_requests")
    assert not host.get("image_name_conflicts")
    with Server(hier, model=model, stop="kill") as server:
        check_hits(answers(server, which), hits, "disk", above=1000)
        other_one = ask(server, alike[2])
        check_right([other_one], right[2:])
        assert cached([other_one])[0] < 2 * PAGE, "the text before the image, and no more"


def test_a_text_with_marks_of_images_in_it_shifts_nobodys_images(tmp_path: Path) -> None:
    """SGLang takes what is between `<img>` and `</img>` for the image, whoever wrote it.

    Of one token there, it would lay rows of the encoder one token off over all images behind it in
    the batch.
    """
    model = str(intern_model.write_internvl(tmp_path / "model"))
    large = [*BASE, *LARGE, "--chunked-prefill-size", "4096"]
    image = intern_model.IMAGE
    prompt = Prompt(words(1, 60) + image + words(2, 90), (picture(5),))
    long = Prompt(words(3, 1500) + image, (picture(6),))
    shifting = Prompt(words(4, 8) + "<img>a</img>" + image + words(5, 4), (picture(7),))
    with Server(large, model=model, stop="kill") as plain:
        right = answers(plain, [prompt])
    tiers = ["--hier-kv-host-size", host_size(400), "--hier-kv-disk-dir", str(tmp_path / "disk")]
    with Server([*large, *PLUGIN, *tiers], model=model, stop="kill") as server:
        with ThreadPoolExecutor(8) as pool:  # all but the first wait, and are computed together
            waits = pool.submit(ask, server, long)
            wrong = [pool.submit(is_refused, server, shifting) for _ in range(3)]
            found = pool.submit(ask, server, prompt)
            check_right([found.result()], right)
            assert all(each.result() for each in wrong)
            waits.result()
        drop(server)
        check_right(found_again := answers(server, [prompt]), right)
        assert cached(found_again)[0] > 3 * PAGE
