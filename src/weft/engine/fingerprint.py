"""The fingerprint of a model's weights: a name that two processes agree on without comparing all numbers."""

import hashlib
from pathlib import Path

SAMPLES = 16  # of each file
SAMPLE_BYTES = 4096


def fingerprint(path: Path, load_format: str) -> str:
    """A digest of config.json and of the sizes and samples of all weight files. Random weights depend on the config.

    It does not depend on the names of folders or on dates, so that copies of a model on other machines have the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((path / "config.json").read_bytes())
    if load_format == "dummy":
        digest.update(b"dummy")
        return digest.hexdigest()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
