"""Damaged files of any kind, and such as lie, end in our own error, soon, and run no code.

Of the damaged, some hundred are tried each time, and 5,000 (in a minute or two) by

    TORCHLADDER_FUZZ=5000 python -m pytest -s tests/checkpoint_files/test_fuzz.py
"""

import os
import pickletools
import random
import re
import resource
import shutil
import time
import zipfile
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from kinds_of_files import (
    OLD,
    Boom,
    header,
    legacy,
    net,
    plain,
    repacked,
    safetensors_file,
    saved,
    shards,
    with_steps,
    written,
)
from running import limited

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)

COUNT = int(os.environ.get("TORCHLADDER_FUZZ", "300"))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Whole files of several kinds, some of which run code when they are unpickled."""
    folder = tmp_path_factory.mktemp("seeds")
    made = []
    for number, build in enumerate([plain, legacy, safetensors_file, shards, evil, evil_legacy]):
        inner = folder / str(number)
        inner.mkdir()
        made.append(build(inner))
    return made, folder


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
def test_no_mutated_file_does_harm(seeds, tmp_path):
    files, folder = seeds
    model, refusals, slowest = net(), Counter(), 0
    for number in range(COUNT):
        inner = tmp_path / str(number)
        inner.mkdir()
        path = mutant(files[number % len(files)], inner, random.Random(number))
        start = time.process_time()
        refusals.update(try_all(path, number, model))
        slowest = max(slowest, time.process_time() - start)
        assert not (folder / "marker").exists(), path
        shutil.rmtree(inner)
    print(f"\n{COUNT} mutated files, the slowest {slowest:.1f} s; refused: {dict(refusals)}")
    assert slowest < 20
    assert COUNT / 5 < refusals["inspect"] < COUNT * 0.95  # else the rest was hardly tried


# --- files that lie -----------------------------------------------------------------------------

NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
WIDTHS = {None: 0, pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}
WIDTHS |= {pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}


def steps_that_lie():
    """Each step of a pickle, about each length, once and again and again."""
    for step in pickletools.opcodes:
        size = step.arg and step.arg.n
        arguments = {n.to_bytes(8, "little")[: WIDTHS.get(size, size)] for n in NUMBERS}
        if size == pickletools.UP_TO_NEWLINE:
            arguments = {b"\n", b"9" * 30 + b"\n", b"os\nsystem\n"}
        for argument, before, count in product(sorted(arguments), (b"", b"](}(NN"), (1, 1000)):
            yield before + (step.code.encode("latin1") + argument) * count


def old_with_steps(folder, steps):
    data = legacy(folder).read_bytes()
    at = [found.end() for found in re.finditer(rb"\x80\x02", data)][3]  # magic, version, system
    return written(folder, data[:at] + steps + data[at:])


def raw_steps(folder, steps):
    return written(folder, b"\x80\x05" + steps + b".")


ZIP = {  # how many bytes each field of a record has, after its signature
    b"PK\3\4": "22222444 22",
    b"PK\1\2": "222222444 2222 244",
    b"PK\6\6": "822448888",
    b"PK\6\7": "484",
    b"PK\5\6": "2222442",
}


def zips_that_lie(folder):
    """A file with another number in one field of one record."""
    data = saved(folder, {"w": torch.arange(4.0)}).read_bytes()
    for signature, widths in ZIP.items():
        for found in re.finditer(re.escape(signature), data):
            at = found.end()
            for width in map(int, widths.replace(" ", "")):
                there = int.from_bytes(data[at : at + width], "little")
                for number in {*NUMBERS[::2], there ^ 1, there ^ 8, there + 64}:
                    lie = (number % 256**width).to_bytes(width, "little")
                    yield data[:at] + lie + data[at + width :]
                at += width


def headers_that_lie():
    for dtype, n, start, end in product(("F32", "F4", "x", 3), (0, 2, 2**62, -1), NUMBERS, NUMBERS):
        yield header({"dtype": dtype, "shape": [n], "data_offsets": [start, end]})
    yield from (header(length=number) for number in NUMBERS)


def files_that_lie(folder):
    for steps in steps_that_lie():
        for build in (raw_steps, with_steps, old_with_steps):
            yield build, steps
    yield from ((written, data) for data in [*zips_that_lie(folder), *headers_that_lie()])


def memory(row):
    """In bytes, VmRSS or, at most since it was last set back, VmHWM."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{row}:\s*(\d+)", status)[1]) * 1024


@pytest.mark.long
def test_no_file_that_lies_takes_a_gigabyte_or_half_a_minute(tmp_path):
    model, refusals, most, slowest = net(), Counter(), 0, 0
    inner, other = tmp_path / "inner", tmp_path / "other"
    other.mkdir()
    for number, (build, data) in enumerate(files_that_lie(other)):
        inner.mkdir()
        path = build(inner, data)
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
        before, start = memory("VmRSS"), time.process_time()
        with limited(resource.RLIMIT_AS, memory("VmSize") + 2**34):  # to save the machine
            refusals.update(try_all(path, number, model))
        took, taken = time.process_time() - start, memory("VmHWM") - before
        assert taken < 1e9, (build, data[:200], taken)
        assert took < 30, (build, data[:200], took)
        most, slowest = max(most, taken), max(slowest, took)
        shutil.rmtree(inner)
        assert list(tmp_path.iterdir()) == [other]
    print(f"\n{number + 1} files: at most {most / 1e6:.0f} MB, {slowest:.1f} s; {dict(refusals)}")
    assert number / 5 < refusals["inspect"] < number  # else the rest was hardly tried
