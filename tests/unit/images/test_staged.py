"""The pixels of requests in shared memory, and how long they stay there."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.images import data_url, image_info, image_tokenizer, picture
from tp_engine.errors import RequestError
from tp_engine.images.image_input import ImageInput
from tp_engine.images.reader import ImageReader
from tp_engine.images.sources import ImageSource
from tp_engine.images.staged import ByteBudget
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams


def reader(**limits: Any) -> ImageReader:
    settings = image_info(**limits).images
    assert settings is not None
    return ImageReader(settings, image_tokenizer(), waits=True)


def staged(one: ImageReader, *images: Image.Image) -> tuple[ImageInput, ...]:
    opened = one.open([ImageSource(where="x", content=data_url(image)) for image in images])
    return one.stage(opened, list(range(len(images))))


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_k25"])
def test_ranks_find_the_pixels_that_rules_and_pillow_make(family: str) -> None:
    """Oracle: Pillow's resize to the size of the rules, and black behind it where the family fills up, read as a rank
    reads it: through the process's folder."""
    kimi = {"patch_size": 16, "size": {"max_height": 8, "max_width": 8}}
    one = reader(family=family, processor=kimi if family == "kimi_k25" else None)
    images = picture(100, 50), picture(33, 333)
    found = staged(one, *images)
    for image, given in zip(found, images, strict=True):
        rows, columns = one.rules.resized(given.height, given.width)
        assert (image.height, image.width) == (rows, columns) and image.offset % 64 == 0
        assert image.grid == (rows // 32, columns // 32) and image.num_tokens == rows * columns // 1024
        with open(f"/proc/{image.pid}/fd/{image.fd}", "rb") as file:
            file.seek(image.offset)
            pixels = np.frombuffer(file.read(image.num_bytes), np.uint8).reshape(rows, columns, 3)
        height, width = one.rules.filled(given.height, given.width)
        assert ((height, width) == (rows, columns)) == (family == "qwen3_5")
        expected = np.zeros_like(pixels)
        expected[:height, :width] = np.asarray(given.resize((width, height), Image.Resampling.BICUBIC))
        assert np.array_equal(pixels, expected)


def test_digests_name_contents() -> None:
    """Oracle: equal pixels of different files are equal; another pixel, size or family is not."""
    one, gemma = reader(), reader(family="gemma4", processor={"do_normalize": False})
    image, other = picture(64, 64), picture(64, 64)
    other.putpixel((0, 0), (1, 2, 3))
    first, *others = [
        staged(one, image)[0].digest,
        staged(one, other)[0].digest,
        staged(one, picture(128, 32))[0].digest,
        staged(gemma, image)[0].digest,
    ]
    assert len(first) == 32 and len({first, *others}) == 4
    assert staged(one, image.convert("RGBA"))[0].digest == first


def test_the_file_closes_with_its_last_image() -> None:
    """Oracle: the process's folder, and the budget; a request holds its images, whatever becomes of it."""
    one = reader()
    images = staged(one, picture(), picture(32, 96))
    request = EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(), images=images)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(images[0]), type=ImageInput) == ImageInput(
        **{name: getattr(images[0], name) for name in ImageInput.__slots__}
    )
    fd, inode = images[0].fd, os.fstat(images[0].fd).st_ino
    del images
    assert one.staged.used > 0 and os.fstat(fd).st_ino == inode
    del request
    assert one.staged.used == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_request_waits_for_room_and_then_is_refused() -> None:
    """Oracle: the error that a server answers with 503; room that is given back meanwhile is taken."""
    budget = ByteBudget(100, "images")
    budget.take(90)
    budget.wait_s = 0.05
    with pytest.raises(RequestError, match="no room for 20 bytes of images") as caught:
        budget.take(20)
    assert caught.value.code == "service_unavailable"
    budget.wait_s = 10.0
    timer = threading.Timer(0.1, budget.give_back, [90])
    timer.start()
    budget.take(20)
    timer.join()
    budget.give_back(20)
    budget.take(1000)  # alone
    assert budget.used == 1000


def test_a_failed_request_gives_its_room_back() -> None:
    """Oracle: the budget after an image whose second half is missing."""
    one = reader()
    data = data_url(picture(300, 300)).partition(",")
    broken = ImageSource(where="x", content=data[0] + "," + data[2][: len(data[2]) // 8 * 4])
    good = ImageSource(where="y", content=data_url(picture()))
    with pytest.raises(RequestError, match="x: the image is"):
        one.stage(one.open([good, broken]), [0, 9])
    assert one.staged.used == 0


def test_the_number_of_images_is_bounded_before_any_is_opened() -> None:
    """Oracle: vLLM's words."""
    with pytest.raises(RequestError, match=r"At most 2 image\(s\) may be provided in one prompt"):
        reader(max_images=2).open([ImageSource(where="x", content="nothing")] * 3)
