#!/usr/bin/env python3
"""Makes data/digits.tar: the 1,797 handwritten digits of the UCI repository as PNG files in class folders.

    tools/make_digits.py [OUT.tar]        needs scikit-learn (Debian: python3-sklearn), for its table

Every fifth picture (i mod 5 = 4) is in test/, the others in train/. The bytes are the same each time: PNG data
are stored, not compressed, so that they do not depend on the version of zlib.
"""
import io
import os
import struct
import sys
import tarfile
import zlib

README = """Optical Recognition of Handwritten Digits
E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49
Licence: Creative Commons Attribution 4.0 International (CC BY 4.0),
https://creativecommons.org/licenses/by/4.0/

These are the 1,797 pictures of its test part, as scikit-learn's load_digits gives them. Changed: values 0 to 16
are scaled to 0 to 255 and stored as 8x8 gray PNG files; picture i is SPLIT/DIGIT/i.png, where SPLIT
is test for i mod 5 = 4 and train otherwise.
"""


def png(rows):
    """An 8-bit gray PNG of a list of rows of bytes."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    raw = b"".join(b"\0" + r for r in rows)  # filter 0 on each row
    stored = b"\x78\x01\x01" + struct.pack("<HH", len(raw), len(raw) ^ 0xFFFF) + raw
    return (b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0))
            + chunk(b"IDAT", stored + struct.pack(">I", zlib.adler32(raw)))
            + chunk(b"IEND", b""))


def add(tar, name, body):
    info = tarfile.TarInfo(name)
    info.size = len(body)
    info.mode = 0o644
    tar.addfile(info, io.BytesIO(body))


def main(argv):
    from sklearn.datasets import load_digits
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    out = argv[0] if argv else os.path.join(root, "data", "digits.tar")
    digits = load_digits()
    with tarfile.open(out, "w", format=tarfile.USTAR_FORMAT) as tar:
        add(tar, "README.txt", README.encode())
        for i, (picture, label) in enumerate(zip(digits.images, digits.target)):
            rows = [bytes(int(v * 255 / 16 + 0.5) for v in row) for row in picture]
            add(tar, f"{'test' if i % 5 == 4 else 'train'}/{label}/{i:04d}.png", png(rows))
    print(f"{out}: {len(digits.target)} pictures, {os.path.getsize(out)} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
