#!/usr/bin/env python3
"""Compares dnnrun's validation pictures, and its class numbers, with torchvision's on any folder of class folders.

    python tests/bench/live_pictures.py BUILD DIR [--resize 256] [--image 224] [--tar X.tar:FOLDER]

BUILD holds libdnnrun.so. With --tar the same pictures are read from a tar as well. Exits with 1 where the mean
difference of a picture is over 1 gray level, or one over 3. Needs torchvision.
"""
import argparse
import ctypes as C
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision import transforms as T
from torchvision.datasets import ImageFolder


class LoaderOpts(C.Structure):  # dnr_loader_opts
    _fields_ = [("batch", C.c_int64), ("image", C.c_int), ("train", C.c_bool), ("shuffle", C.c_bool),
                ("seed", C.c_uint64), ("start", C.c_int64), ("rank", C.c_int), ("world", C.c_int), ("crop", C.c_int),
                ("resize", C.c_int), ("pad", C.c_int), ("flip", C.c_bool), ("area", C.c_double * 2),
                ("aspect", C.c_double * 2), ("on_error", C.c_int), ("max_bad", C.c_int64), ("max_pixels", C.c_int64),
                ("threads", C.c_int), ("prefetch", C.c_int), ("timeout_s", C.c_double)]


class Batch(C.Structure):  # dnr_batch
    _fields_ = [("slot", C.c_void_p), ("labels", C.POINTER(C.c_int32)), ("pixels", C.POINTER(C.c_uint8)),
                ("position", C.c_int64), ("count", C.c_int64), ("index", C.c_int),
                ("bytes", C.c_size_t)]


class Error(C.Structure):  # dnr_error
    _fields_ = [("status", C.c_int), ("where", C.c_char * 96), ("what", C.c_char * 640), ("remedy", C.c_char * 320)]


def pictures(lib, path, resize, image):
    """name, label, uint8[image, image, 3] of each sample of a validation pass"""
    def ok(status):
        if status:
            sys.exit(f"dnnrun: {lib.dnr_last_error().contents.what.decode()}")

    source, loader, batch, more = C.c_void_p(), C.c_void_p(), Batch(), C.c_bool()
    ok(lib.dnr_source_open(path.encode(), None, C.byref(source)))
    opts = LoaderOpts(batch=16, image=image, resize=resize, on_error=1, max_bad=-1)
    ok(lib.dnr_loader_open(source, None, C.byref(opts), C.byref(loader)))
    while True:
        ok(lib.dnr_loader_next(loader, C.byref(batch), C.byref(more)))
        if not more.value:
            break
        pixels = np.ctypeslib.as_array(batch.pixels, (16, image, image, 3)).copy()
        labels = batch.labels[:16]
        for k in range(batch.count):
            yield lib.dnr_source_sample_name(source, batch.position + k).decode(), labels[k], pixels[k]
        lib.dnr_loader_release(loader, C.byref(batch))
    lib.dnr_loader_close(loader)
    lib.dnr_source_close(source)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("build")
    p.add_argument("dir")
    p.add_argument("--resize", type=int, default=256)
    p.add_argument("--image", type=int, default=224)
    p.add_argument("--tar")
    a = p.parse_args()
    lib = C.CDLL(str(Path(a.build) / "libdnnrun.so"))
    lib.dnr_last_error.restype = C.POINTER(Error)
    lib.dnr_source_sample_name.restype = C.c_char_p
    lib.dnr_source_sample_name.argtypes = [C.c_void_p, C.c_int64]
    see = T.Compose([T.Resize(a.resize), T.CenterCrop(a.image)])
    folder = ImageFolder(a.dir)
    mean = top = 0
    for path in [a.dir] + ([a.tar] if a.tar else []):
        n = 0
        for (name, label, got), (file, target) in zip(pictures(lib, path, a.resize, a.image), folder.samples, strict=True):
            if label != target or Path(name.split(":")[-1]).name != Path(file).name:
                sys.exit(f"{name} is class {label}; torchvision has {file}, class {target}")
            want = np.asarray(see(Image.open(file).convert("RGB")), dtype=int)
            d = np.abs(got - want)
            mean, top, n = max(mean, d.mean()), max(top, d.max()), n + 1
        print(f"{path}: {n} pictures; largest mean difference {mean:.4f}, largest difference {top} gray levels")
    sys.exit(mean > 1 or top > 3)


if __name__ == "__main__":
    main()
