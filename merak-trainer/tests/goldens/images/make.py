"""Makes the images of two classes, and what Pillow makes of them: the pixels that ViTImageProcessor
of transformers would have before it scales them.

    python make.py        # needs pillow and numpy
"""

import json
import pathlib

import numpy
from PIL import Image

HERE = pathlib.Path(__file__).resolve().parent
SIZE = 12


def image(seed, width, height, mode):
    """A gradient with some noise."""
    draw = numpy.random.default_rng(seed)
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    x = numpy.linspace(0, 200, width)[None, :, None]
    y = numpy.linspace(0, 1, height)[:, None, None]
    phase = draw.uniform(0.2, 1.0, channels)[None, None, :]
    values = x * phase * (1 - y) + 50 * y + draw.uniform(0, 40, (height, width, channels))
    values = values.clip(0, 255).astype("uint8")
    return Image.fromarray(values.squeeze(-1) if mode == "L" else values, mode)


def main():
    expected = {}
    for name, (seed, width, height, mode) in {
        "cats/wide.png": (1, 40, 30, "RGB"),
        "cats/small.png": (2, 7, 9, "RGB"),
        "dogs/clear.png": (3, 12, 12, "RGBA"),
        "dogs/photo.JPG": (4, 33, 51, "RGB"),
        "dogs/grey.png": (5, 20, 25, "L"),
    }.items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        made = image(seed, width, height, mode)
        made.save(path, **({"quality": 95} if name.endswith("JPG") else {}))
        read = Image.open(path).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        expected[name] = numpy.asarray(read).transpose(2, 0, 1).flatten().tolist()
    text = json.dumps(expected, separators=(",", ":")).replace("],", "],\n")
    (HERE / "pixels.json").write_text(text + "\n")


main()
