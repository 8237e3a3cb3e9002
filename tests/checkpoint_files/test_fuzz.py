"""Damaged files of any kind end in our own error, soon, and run no code.

Some are tried each time, and 5,000 (in a minute or two) by

    TORCHLADDER_FUZZ=5000 python -m pytest -s tests/checkpoint_files/test_fuzz.py
"""

import os
import random
import shutil
import time
import zipfile
from collections import Counter

import pytest
import torch
from kinds_of_files import (
    OLD,
    Boom,
    legacy,
    net,
    plain,
    repacked,
    safetensors_file,
    saved,
    shards,
)

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)

COUNT = int(os.environ.get("TORCHLADDER_FUZZ", "150"))


def seeds(folder):
    """Whole files of several kinds, some of which run code when they are unpickled."""
    for number, build in enumerate([plain, legacy, safetensors_file, shards, evil, evil_legacy]):
        inner = folder / str(number)
        inner.mkdir(parents=True)
        yield build(inner)


def evil(folder, **options):
    thing = {"model": net().state_dict(), "n": Boom(folder.parent / "marker"), "epoch": 3}
    return saved(folder, thing, **options)


def evil_legacy(folder):
    return evil(folder, **OLD)


def mutated(data, chance):
    """`data` with a few bytes flipped, replaced, taken out, put in, doubled or cut off."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5, 20])):
        at, length = chance.randrange(len(data) or 1), chance.choice([1, 1, 2, 8, 64])
        changes = [
            (at, at + 1, bytes(byte ^ 1 << chance.randrange(8) for byte in data[at : at + 1])),
            (at, at + length, chance.randbytes(length)),
            (at, at + length, b""),
            (at, at, chance.randbytes(length)),
            (at, at, data[at : at + 64]),
            (at, at + 8, chance.choice([b"\0" * 8, b"\xff" * 8, b"\xff" * 4])),
            (at, len(data) if chance.random() < 0.2 else at, b""),
        ]
        start, end, new = chance.choice(changes)
        data[start:end] = new
    return bytes(data)


def mutant(seed, folder, chance):
    """A damaged copy of a whole file or folder."""
    path = folder / seed.name
    if seed.is_dir():
        shutil.copytree(seed, path)
        victim = chance.choice(sorted(path.iterdir()))
        victim.write_bytes(mutated(victim.read_bytes(), chance))
        return path
    shutil.copy(seed, path)
    if zipfile.is_zipfile(path) and chance.random() < 0.6:  # the pickle itself is to be read
        return repacked(path, lambda name, data: mutated(data, chance) if "pkl" in name else data)
    path.write_bytes(mutated(path.read_bytes(), chance))
    return path


def refused(work, *arguments, **options):
    """Whether it ends in our own error; any other error fails the test."""
    told = ""
    try:
        repr(work(*arguments, **options))
    except CheckpointError as error:
        told = str(error)
    assert told.isprintable(), told
    assert len(told) < 1000, told
    return bool(told)


def try_all(path, number, model):
    """Do with one file all that can be done; which of it was refused."""
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    target = path.parent / ("fixed.safetensors" if number % 4 == 0 else "fixed.pt")
    refusals = {
        "inspect": refused(inspect_checkpoint, path),
        "fix": refused(fix_checkpoint, path, target),
        "load_into": refused(load_into, model, path, strict=number % 2 == 0),
    }
    assert target.exists() != refusals["fix"], path
    if refusals["load_into"]:
        assert all(map(torch.equal, model.state_dict().values(), before.values())), path
    model.load_state_dict(before)
    return [name for name, was_refused in refusals.items() if was_refused]


@pytest.mark.slow
def test_no_mutated_file_does_harm(tmp_path):
    files = [*seeds(tmp_path / "seeds")]
    model, refusals, slowest = net(), Counter(), 0
    for number in range(COUNT):
        inner = tmp_path / str(number)
        inner.mkdir()
        path = mutant(files[number % len(files)], inner, random.Random(number))
        start = time.process_time()
        refusals.update(try_all(path, number, model))
        slowest = max(slowest, time.process_time() - start)
        assert not (tmp_path / "seeds" / "marker").exists(), path
        shutil.rmtree(inner)
    print(f"\n{COUNT} mutated files, the slowest {slowest:.1f} s; refused: {dict(refusals)}")
    assert slowest < 20
    assert COUNT / 5 < refusals["inspect"] < COUNT * 0.95  # else the rest was hardly tried
