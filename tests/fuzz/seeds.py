#!/usr/bin/env python3
"""Writes the inputs that fuzzing begins with: seeds.py OUT makes OUT/cfg, OUT/tar …"""
import base64
import io
import json
import struct
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Pillow's, of a 16 x 16 gradient and smaller
PICTURES = {
    "baseline.jpg": """
        /9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABsSFBcUERsXFhceHBsgKEIrKCUlKFE6PTBCYFVlZF9VXVtqeJmBanGQc1tdhbWGkJ6jq62rZ4C8
        ybqmx5moq6T/2wBDARweHigjKE4rK06kbl1upKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKT/wAAR
        CAAQABADASIAAhEBAxEB/8QAHwAAAQUBAQEBAQEAAAAAAAAAAAECAwQFBgcICQoL/8QAtRAAAgEDAwIEAwUFBAQAAAF9AQIDAAQRBRIhMUEG
        E1FhByJxFDKBkaEII0KxwRVS0fAkM2JyggkKFhcYGRolJicoKSo0NTY3ODk6Q0RFRkdISUpTVFVWV1hZWmNkZWZnaGlqc3R1dnd4eXqDhIWG
        h4iJipKTlJWWl5iZmqKjpKWmp6ipqrKztLW2t7i5usLDxMXGx8jJytLT1NXW19jZ2uHi4+Tl5ufo6erx8vP09fb3+Pn6/8QAHwEAAwEBAQEB
        AQEBAQAAAAAAAAECAwQFBgcICQoL/8QAtREAAgECBAQDBAcFBAQAAQJ3AAECAxEEBSExBhJBUQdhcRMiMoEIFEKRobHBCSMzUvAVYnLRChYk
        NOEl8RcYGRomJygpKjU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6goOEhYaHiImKkpOUlZaXmJmaoqOkpaanqKmqsrO0
        tba3uLm6wsPExcbHyMnK0tPU1dbX2Nna4uPk5ebn6Onq8vP09fb3+Pn6/9oADAMBAAIRAxEAPwDIitvarkVr7Vbhtvar8Nr7VzKXMPDYk//Z""",
    "progressive.jpg": """
        /9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABsSFBcUERsXFhceHBsgKEIrKCUlKFE6PTBCYFVlZF9VXVtqeJmBanGQc1tdhbWGkJ6jq62rZ4C8
        ybqmx5moq6T/2wBDARweHigjKE4rK06kbl1upKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKT/wgAR
        CAAQABADASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAwT/xAAVAQEBAAAAAAAAAAAAAAAAAAAAA//aAAwDAQACEAMQAAABjZnk/8QA
        FhAAAwAAAAAAAAAAAAAAAAAAAAEC/9oACAEBAAEFAlIpFIpP/8QAFREBAQAAAAAAAAAAAAAAAAAAAwD/2gAIAQMBAT8BNL//xAAVEQEBAAAA
        AAAAAAAAAAAAAAARAP/aAAgBAgEBPwFb/8QAFBABAAAAAAAAAAAAAAAAAAAAIP/aAAgBAQAGPwIf/8QAFBABAAAAAAAAAAAAAAAAAAAAIP/a
        AAgBAQABPyEDf//aAAwDAQACAAMAAAAQ3//EABQRAQAAAAAAAAAAAAAAAAAAAAD/2gAIAQMBAT8Qf//EABURAQEAAAAAAAAAAAAAAAAAAAAB
        /9oACAECAQE/EIP/xAAVEAEBAAAAAAAAAAAAAAAAAAAAYf/aAAgBAQABPxCaSKD/2Q==""",
    "cmyk.jpg": """
        /9j/7gAOQWRvYmUAZAAAAAAA/9sAQwAoHB4jHhkoIyEjLSsoMDxkQTw3Nzx7WF1JZJGAmZaPgIyKoLTmw6Cq2q2KjMj/y9ru9f///5vB////
        +v/m/f/4/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EAB8AAAEFAQEBAQEBAAAAAAAAAAABAgMEBQYHCAkKC//EALUQAAIBAwMCBAMFBQQEAAAB
        fQECAwAEEQUSITFBBhNRYQcicRQygZGhCCNCscEVUtHwJDNicoIJChYXGBkaJSYnKCkqNDU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hp
        anN0dXZ3eHl6g4SFhoeIiYqSk5SVlpeYmZqio6Slpqeoqaqys7S1tre4ubrCw8TFxsfIycrS09TV1tfY2drh4uPk5ebn6Onq8fLz9PX29/j5
        +v/aAA4EQwBNAFkASwAAPwBuldqb/Zn+zVG1tvOxxWzX/9k=""",
    "gray.jpg": """
        /9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKrarYqMyP/L2u71////m8H/
        ///6/+b9//j/wAALCAAQABABAREA/8QAFQABAQAAAAAAAAAAAAAAAAAABAP/xAAXEAADAQAAAAAAAAAAAAAAAAAAA2EC/9oACAEBAAA/AAYT
        BGEwutMFLTD/2Q==""",
    "palette.png": """
        iVBORw0KGgoAAAANSUhEUgAAABAAAAAQBAMAAADt3eJSAAAAGFBMVEWw0I8w0CewiF4wiBqwSDKwEAswSA4wEAOqEKZjAAAAQ0lEQVR4nG3K
        wQmAMBTA0Peld3UWh3Pb0g3aCaqXDyL0FpLEjYoNUwIoHc9IM1ZPjQt7S9MyPb+nzCaO2cSJvno+eAFW3hHKPTGSrgAAAABJRU5ErkJggg==""",
    "gray16.png": """
        iVBORw0KGgoAAAANSUhEUgAAAAQAAAAEEAAAAADcCh3hAAAAC0lEQVR4nGNgIAwAACQAAbZm3wQAAAAASUVORK5CYII=""",
    "x.gif": """
        R0lGODdhCAAIAIIAALDQjzDQJ7CIXjCIGrBIMrAQCzBIDjAQAywAAAAACAAIAAAIKgAPCCxAkKCBgwYIKCSAcKHCARAHCJgoICLFiQEyTgTA
        MWMAjiA9guQYEAA7""",
    "x.bmp": """
        Qk1mAAAAAAAAADYAAAAoAAAABAAAAAQAAAABABgAAAAAADAAAADEDgAAxA4AAAAAAAAAAAAAFdcZSddXgdeZtNfXD5kZNJlXXJmZgJnXCVcZ
        HVdXNFeZSVfXAxkZCRlXDxmZFRnX""",
}


def tar(members, form):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as t:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return out.getvalue()[:-8192]  # of the padding


def safetensors(tensors, metadata):
    header, at = ({"__metadata__": metadata} if metadata else {}), 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def main():
    out = Path(sys.argv[1])
    pictures = {name: base64.b64decode(text) for name, text in PICTURES.items()}
    seeds = {"cfg": {p.name: p.read_bytes() for p in (ROOT / "models").glob("*.cfg")}, "decode": dict(pictures)}
    with tarfile.open(ROOT / "data/digits.tar") as digits:
        png = next(m for m in digits if m.name.endswith(".png"))
        seeds["decode"]["digit.png"] = digits.extractfile(png).read()
    folders = [("a/x.jpg", pictures["gray.jpg"]), ("b/y.png", pictures["gray16.png"])]
    shards = [("0001.jpg", pictures["gray.jpg"]), ("0001.cls", b"3"), ("0002.png", b"?"), ("0002.cls", b"0\n")]
    long = [("d" * 90 + "/" + "f" * 120 + ".png", b"x"), ("e/ü.png", b"y")]
    seeds["tar"] = {"folders": tar(folders, tarfile.USTAR_FORMAT), "shards": tar(shards, tarfile.GNU_FORMAT),
                    "gnu": tar(long, tarfile.GNU_FORMAT), "pax": tar(long, tarfile.PAX_FORMAT)}
    seeds["safetensors"] = {
        "small": safetensors({"fc.weight": ("F32", [2, 3], 24), "n": ("I64", [], 8)}, {"architecture": "resnet8"}),
        "half": safetensors({"a": ("F16", [4], 8), "b": ("BF16", [0], 0), "c": ("F64", [1, 1], 8)}, None)}
    seeds["records"] = {
        "run": b'{"event":"train","step":10,"loss":1.5}\n{"event":"eval","step":2000,"top1":null}\n{"event":"tr',
        "odd": b'\n\n{"step": 1e3}\n[1]\n{"step": 999999999999999999999}\n{"step":3}\r\n'}
    for target, files in seeds.items():
        (out / target).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (out / target / name).write_bytes(data)


main()
