#!/usr/bin/env python3
"""Makes pictures.json: small encoded pictures with what Pillow decodes, and torchvision's resizing on PIL images.

    python tests/golden/pictures.py        needs torchvision and Pillow

Nothing in it comes from a photograph: pictures are formulas, which test_decode.c repeats, and the bundled digits.
"""
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import functional as F

HERE = Path(__file__).resolve().parent


def formula(w, h):
    """Smooth waves with sharp edges, as uint8[h, w, 3]; integer arithmetic, the same in C."""
    y, x, c = np.meshgrid(np.arange(h), np.arange(w), np.arange(3), indexing="ij")
    return ((3 * x * x + 5 * y * y + 2 * x * y * (c + 1) + 90 * c) // 16 % 256).astype(np.uint8)


def hexed(array):
    return np.ascontiguousarray(array).tobytes().hex()


def encoded():
    """name, whether the codec keeps the pixels, bytes"""
    rgb = Image.fromarray(formula(18, 13))
    alpha = Image.fromarray(np.dstack([formula(18, 13), formula(18, 13)[:, :, 1]]))
    cmyk = Image.fromarray(np.dstack([formula(18, 13), formula(18, 13)[:, :, 1]]), mode="CMYK")
    for name, image, kind, options in [
        ("jpeg 420", rgb, "JPEG", dict(quality=90)),
        ("jpeg 444", rgb, "JPEG", dict(quality=90, subsampling=0)),
        ("jpeg progressive", rgb, "JPEG", dict(quality=80, progressive=True)),
        ("jpeg gray", rgb.convert("L"), "JPEG", dict(quality=90)),
        ("jpeg cmyk", cmyk, "JPEG", dict(quality=90)),
        ("png rgb", rgb, "PNG", {}),
        ("png gray", rgb.convert("L"), "PNG", {}),
        ("png bilevel", rgb.convert("1"), "PNG", {}),
        ("png palette", rgb.quantize(20), "PNG", {}),
        ("png rgba", alpha, "PNG", {}),
        ("bmp", rgb, "BMP", {}),
    ]:
        out = io.BytesIO()
        image.save(out, kind, **options)
        yield name, out.getvalue()


def decode():
    cases = []
    for name, data in encoded():
        rgb = Image.open(io.BytesIO(data)).convert("RGB")
        cases.append(dict(name=name, bytes=data.hex(), w=rgb.width, h=rgb.height, rgb=hexed(rgb)))
    return cases


def resize():
    cases = []

    def case(source, picture, **view):
        """view: resize + image (Resize, CenterCrop), or box [top, left, height, width] + image (resized_crop)"""
        if "box" in view:
            out = F.resized_crop(picture, *view["box"], [view["image"]] * 2)
        else:
            out = F.center_crop(F.resize(picture, view["resize"]), [view["image"]] * 2)
        cases.append(dict(source=source, w=picture.width, h=picture.height, **view, rgb=hexed(out)))

    for w, h, size, crop in [(40, 30, 16, 14), (30, 41, 17, 12), (90, 70, 12, 12), (9, 7, 15, 12), (1, 1, 5, 4),
                             (200, 6, 9, 8), (5, 170, 8, 7), (33, 33, 33, 20), (16, 11, 11, 11), (21, 10, 14, 13)]:
        case("formula", Image.fromarray(formula(w, h)), resize=size, image=crop)
    for w, h, box, crop in [(40, 30, [3, 5, 20, 31], 12), (40, 30, [0, 0, 30, 40], 9), (40, 30, [29, 39, 1, 1], 4),
                            (64, 48, [10, 7, 12, 12], 12), (64, 48, [4, 2, 12, 50], 12), (64, 48, [4, 2, 40, 12], 12)]:
        case("formula", Image.fromarray(formula(w, h)), box=box, image=crop)
    with tarfile.open(HERE.parent.parent / "data" / "digits.tar") as tar:
        for i, name in [(0, "train/0/0000.png"), (1, "train/0/0010.png")]:
            image = Image.open(io.BytesIO(tar.extractfile(name).read())).convert("RGB")
            case(f"digit {i}", image, resize=13, image=12)
            case(f"digit {i}", image, box=[1, 2, 6, 5], image=8)
    return cases


def main():
    out = HERE / "pictures.json"
    out.write_text(json.dumps(dict(decode=decode(), resize=resize()), indent=0) + "\n")
    print(f"{out.name}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
