"""Open a checkpoint of any kind: no code in it is run, and its numbers stay on the disk.

The formats are read by PyTorch and by safetensors. What is added here: `InertPickle` in place of
``pickle``, a word for each thing that is no checkpoint, and checksums, which ``torch.load`` never
compares.
"""

import json
import os
import re
import struct
import sys
import tarfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from torchclinic import UserError, printable
from torchclinic.checkpoint_files.foreign import (
    SHARD,
    TEXTS,
    WAYS,
    filled,
    part_note,
    parts_of,
    stays_inside,
)
from torchclinic.checkpoint_files.pickles import InertPickle, overflows, storage_id
from torchclinic.checkpoint_files.reports import free_name, path_word, some, word

CUT_OFF = "cut off, as by a full disk or a broken copy"
AGAIN = "Copy or save it again."

LIGHTNING = "pytorch-lightning_version"  # in every file of Lightning, beside the weights
TIES = "torchclinic.ties"  # a note in safetensors files, in JSON: which name is another's tensor
ENDINGS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pth.tar")
# Of several files in a folder, the one with the model's weights, or an adapter's, by its name.
# (The second model of Accelerate's is called model_1.safetensors.)
THE_WEIGHTS = re.compile(r"((diffusion_)?pytorch_|adapter_)?model(_\d+)?\.(safetensors|bin)")
BEGINNINGS = {start.encode("latin1"): what for start, what in TEXTS["beginnings"].items()}
# A version, and who wrote it, in how many letters.
ONNX = re.compile(rb"\x08[\x03-\x20]\x12.[\x20-\x7e]+[\x1a\x22:B]", re.DOTALL)


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be read, fixed or loaded: the message says why, and the way out.

    A RuntimeError too, as that is what ``load_state_dict`` raises and programs catch.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@contextmanager
def named_in_utf8(path: Path, *, hide: bool = False) -> Iterator[str]:
    """A name for a file that PyTorch and safetensors take, whatever bytes are in its own."""
    if hide or re.search("[\ud800-\udfff]", str(path)):
        with open(path, "rb") as file:
            yield f"/dev/fd/{file.fileno()}"
    else:
        yield os.fspath(path)


@dataclass
class Checkpoint:
    """An open checkpoint."""

    path: Path
    format: str  # such as "torch.save (zip)"
    tree: Any  # what was saved: tensors mapped from the file; a `StandIn` for what is no plain data
    files: list[Path]  # all that it lies in
    imports: list[str] = field(default_factory=list)  # what weights_only=True refuses to import
    devices: dict[int, str] = field(default_factory=dict)  # by `storage_id`: saved from where;
    # empty if the format does not say: safetensors
    checksums: dict[int, int] = field(default_factory=dict)  # by `storage_id`: CRC-32
    unlisted: list[str] = field(default_factory=list)  # keys in shards that the index does not list
    classes: list[str] = field(default_factory=list)  # of tensors that were made plain ones

    def unlisted_note(self) -> str:
        """The reports' line on what is left out since the index does not list it."""
        count = f"{len(self.unlisted):,} in shards, and not in the index there"
        return f"{count}: {some(self.unlisted)}" if self.unlisted else ""

    def class_note(self) -> str:
        """The reports' line on what tensors anywhere in the file had beside their numbers."""
        return f"of {some(self.classes)} tensors, all but the numbers" if self.classes else ""

    def device(self, tensor: Tensor) -> str:
        """Where the tensor was when it was saved."""
        return self.devices.get(storage_id(tensor), "cpu")

    def verify(self, values: Iterable[tuple[str, Any]]) -> int:
        """Compare tensors' storages with their checksums; how many have one.

        Raises
        ------
        CheckpointError
            If some are not what was written.
        """
        named = {storage_id(v): (name, v) for name, v in values if isinstance(v, Tensor)}
        named = {i: found for i, found in named.items() if i in self.checksums}
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # crc32 lets other threads run
            found = threads.map(_crc32, (tensor for _, tensor in named.values()))
            pairs = zip(named, found, strict=True)
            damaged = [named[i][0] for i, crc in pairs if crc != self.checksums[i]]
        if damaged:
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise CheckpointError(
                f"{self.path}: the numbers of {damaged[0]!r}{more} are not those that were saved, "
                "for their checksum differs. Copy the file again, or take an older one."
            )
        return len(named)


def _crc32(tensor: Tensor) -> int:
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return zlib.crc32(storage.numpy().data)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Recognise a file or folder and read all of it but the numbers.

    Raises
    ------
    CheckpointError
        If it is not a checkpoint, or is damaged.
    OSError
        If it is not there or may not be read.
    """
    if not os.fspath(path):  # pathlib would take it for the current folder
        raise CheckpointError("The path is empty: name a file, or a sharded checkpoint's folder.")
    try:
        before = _which(Path(path))
        found = _read(Path(path))
        if _which(Path(path)) != before:
            raise CheckpointError(f"{path}: it changed while it was read. Try again when it rests.")
        return found
    except CheckpointError:
        raise
    except Exception as error:  # damage can show anywhere, as anything
        if isinstance(error, OSError) and error.filename is not None:  # not there, not readable
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())[:150]
        raise CheckpointError(
            f"{path}: damaged, cut off, or not a checkpoint ({what}). {AGAIN}"
        ) from error


def _which(path: Path) -> tuple[int, ...]:
    """What tells a file from another that is there later under its name."""
    about = path.stat() if path.is_file() else None
    return (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns) if about else ()


def _read(path: Path) -> Checkpoint:
    if path.is_dir():
        return _read_folder(path)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: a device, pipe or socket; name a file or a folder.")
    if path.is_file() and (path.suffix == ".distcp" or path.name == ".metadata"):
        words = filled(TEXTS["folders"][".metadata"], path.absolute())
        raise CheckpointError(f"{path}: a part of {path.absolute().parent}, {words}")
    if path.name.endswith(".index.json"):
        return _read_index(path)
    with open(path, "rb") as file:
        head = file.read(512)
    if head.startswith(b"PK\x03\x04"):
        return _read_zip(path)
    # Of 32 lengths of safetensors' header, one begins as pickles do.
    if head[8:9] == b"{" and not (head.startswith(b"\x80") and any(head[5:8])):
        return _read_safetensors(path)
    if head.startswith(b"\x80"):
        return _read_pickles(path)
    raise CheckpointError(f"{path}: {_what_else(path, head, path.stat().st_size)}")


def _read_zip(path: Path) -> Checkpoint:
    """What ``torch.save`` writes since PyTorch 1.6."""
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"{path}: {CUT_OFF}: torch.save's directory at the end of the file is missing. {AGAIN}"
        ) from None
    with archive:
        entries = _entries(path, archive)
    # Under torch.serialization.set_crc32_options(False), torch writes 0 for all of them.
    has_checksums = any(entry.CRC for entry in entries.values())
    inert = InertPickle()
    checkpoint = _torch_load(path, "torch.save (zip)", inert, mmap=True)
    for i, (key, _, nbytes) in inert.storages.items():
        entry = entries[f"data/{key}"]
        if entry.compress_size != nbytes:
            raise CheckpointError(
                f"{path}: damaged: {entry.compress_size} bytes under {key}, not {nbytes}. {AGAIN}"
            )
        if has_checksums:
            checkpoint.checksums[i] = entry.CRC
    return checkpoint


def _entries(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The entries of a ``torch.save`` archive by their names; all but the numbers are checked."""
    infos = archive.infolist()
    for name in {info.filename.rpartition("/")[2] for info in infos} & TEXTS["programs"].keys():
        raise CheckpointError(f"{path}: a program of {filled(TEXTS['programs'][name], path)}.")
    roots = [i.filename[:-8] for i in infos if re.fullmatch(r"[^/]+/data\.pkl", i.filename)]
    if len(roots) != 1:
        names = [info.filename for info in infos]
        if names and all(name.endswith(".npy") for name in names):
            way = f"numpy.load({str(path)!r}) reads it, and torch.from_numpy makes tensors of it"
            raise CheckpointError(f"{path}: NumPy's .npz, not a file of torch.save. {way}.")
        held = f"it holds {some(map(repr, names[:1000]))}. Unpack it, and name what is in it"
        raise CheckpointError(f"{path}: a zip archive, but not one of torch.save: {held}.")
    if (
        any(info.compress_type for info in infos)
        or sum(info.file_size for info in infos) > path.stat().st_size
        or len({info.filename.lower() for info in infos}) < len(infos)  # as PyTorch compares
        or not _ends_once(archive.fp)
    ):
        raise CheckpointError(
            f"{path}: its entries are compressed, overlap, or may be listed twice. Unpack it and, "
            f"beside the folder, pack that with `zip -0 -r {free_name('x.pt')} FOLDER`."
        )
    entries = {info.filename.removeprefix(roots[0]): info for info in infos}
    if any(info.CRC for info in infos):
        for name in [name for name in entries if not name.startswith("data/")]:
            archive.read(entries[name])  # compares its checksum, which torch does not
    with named_in_utf8(path) as name:
        reader = torch._C.PyTorchFileReader(name)
    order = sys.byteorder.encode()
    if "byteorder" in reader.get_all_records() and reader.get_record("byteorder") != order:
        way = f"torch.save(torch.load({str(path)!r}, 'cpu'), '{free_name('plain.pt')}') turns them"
        raise CheckpointError(f"{path}: its numbers are in another processor's byte order. {way}.")
    return entries


def _ends_once(file: Any) -> bool:
    """Whether a zip archive's directory is right before its end, where `zipfile` takes it from.

    PyTorch takes the one that the end names, which might be another.
    """
    at = file.seek(-98, os.SEEK_END)
    # The end for large numbers, where that is, and the old one.
    large, size, start, where, place, *old = struct.unpack("<4s36xQQ4s4xQ4x4s8xLL2x", file.read())
    if where == b"PK\6\7":
        return (large, start + size, place) == (b"PK\6\6", at, at)
    return (old[0], old[1] + old[2]) == (b"PK\5\6", at + 76)


def _torch_load(path: Path, kind: str, inert: InertPickle, *, mmap: bool) -> Checkpoint:
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        raise CheckpointError(f"{path}: unset TORCH_FORCE_WEIGHTS_ONLY_LOAD; nothing in it is run.")
    misnamed = path.suffix == ".safetensors"  # by which torch.load takes it for no pickle
    with warnings.catch_warnings(), named_in_utf8(path, hide=misnamed) as name:
        warnings.simplefilter("ignore")  # a class that is not here, a buffer that is not writable
        # As "cpu", and torch.jit.load refuses it, to which torch.load would hand a program of
        # TorchScript's that is there by now.
        stay = {"map_location": lambda storage, place: storage}
        tree = torch.load(name, **stay, pickle_module=inert, weights_only=False, mmap=mmap)
    devices = {i: device for i, (_, device, _) in inert.storages.items()}
    imports, classes = [*inert.imports], [*inert.classes]
    return Checkpoint(path, kind, tree, [path], imports, devices, classes=classes)


def _read_pickles(path: Path) -> Checkpoint:
    """What ``torch.save`` wrote before version 1.6; or a pickle that it did not write."""
    if tarfile.is_tarfile(path):
        raise CheckpointError(f"{path}: {filled(WAYS['tar'], path)}")
    inert = InertPickle()
    try:
        with open(path, "rb") as file:
            first = inert.load(file)
    except Exception as error:
        if "joblib.numpy_pickle.NumpyArrayWrapper" in inert.imports:  # numbers between the steps
            raise CheckpointError(f"{path}: {filled(WAYS['joblib'], path)}") from error
        raise
    if first != torch.serialization.MAGIC_NUMBER:
        return Checkpoint(path, "pickle, not by torch.save", first, [path], [*inert.imports])
    return _torch_load(path, "torch.save (before 1.6)", inert, mmap=False)


def _read_safetensors(path: Path) -> Checkpoint:
    with named_in_utf8(path) as name, safe_open(name, framework="pt") as file:
        tree = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        notes = file.metadata() or {}
    if wide := [key for key, value in tree.items() if overflows(value.shape, value.dtype)]:
        raise CheckpointError(f"{path}: damaged: no tensor has the shape of {wide[0]!r:.80}.")
    with open(path, "rb") as header:  # of a key that is there twice, safetensors takes the last
        text = header.read(int.from_bytes(header.read(8), "little"))
    json.loads(text, object_pairs_hook=lambda pairs: len(_dict_of_once(pairs)))
    # One tensor under two names is stored once. fix lists the others; safetensors' save_model makes
    # each of them a note, such as others may write: "epoch": "3" need not be on a tensor called 3.
    alike = {name: kept for name, kept in notes.items() if _last(name) == _last(kept)}
    ties = json.loads(notes[TIES]) if TIES in notes else alike
    tree |= {name: tree[kept] for name, kept in ties.items() if kept in tree and name not in tree}
    return Checkpoint(path, "safetensors", tree, [path])


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _read_folder(path: Path) -> Checkpoint:
    names = sorted(p.name for p in path.iterdir())
    indices = [name for name in names if name.endswith(".index.json")]
    single = [n for n in names if n.endswith(ENDINGS)]
    whole = [name for name in single if THE_WEIGHTS.fullmatch(name)]
    weights = whole or single
    for name, words in TEXTS["folders"].items():
        if name in names and not whole + indices:
            raise CheckpointError(f"{path}: {filled(words, path, pack=_packing(path))}")
    if any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names):
        raise CheckpointError(f"{path}: a step of DeepSpeed's. {filled(WAYS['zero'], path)}")
    if len(indices) == 1:
        return _open_inside(path, indices[0])
    shards = [name for name in weights if SHARD.search(name) and not indices]
    for first in (path / name for name in shards if parts_of(path / name)):  # the first one
        if parts_of(first) == shards:
            return _read_shards(path, shards)
        raise CheckpointError(f"{first}: {part_note(first)}")
    if len(weights) == 1:
        return _open_inside(path, weights[0])
    inside = some(names, 8) or "it is empty"
    raise CheckpointError(f"{path}: a folder; name a checkpoint in it ({inside}).")


def _packing(folder: Path) -> str:
    """The command that packs an unpacked file, beside its folder.

    In the archive stands what zip is told, and PyTorch takes the name of one folder alone.
    """
    folder = Path(os.path.abspath(folder))
    command = f"zip -0 -r {free_name('x.pt', folder.parent)} {path_word(folder.name)}"
    return f"(cd {word(folder.parent)} && {command})"


def _open_inside(folder: Path, name: str) -> Checkpoint:
    """Open a file of a folder."""
    if not stays_inside(path := folder / name):
        raise CheckpointError(f"{path}: a link out of its folder. Name {path.resolve()} itself.")
    return open_checkpoint(path)


def _read_index(index: Path) -> Checkpoint:
    """Hugging Face's: a JSON file says in which shard each key lies."""
    homes = json.loads(index.read_text("utf-8"), object_pairs_hook=_dict_of_once)["weight_map"]
    return _read_shards(index, sorted(set(homes.values())), homes)


def _read_shards(index: Path, names: list[str], homes: dict[str, str] | None = None) -> Checkpoint:
    """All of a folder's; without an index, that of the folder, each key is where it is."""
    folder = index if homes is None else index.parent
    whole, trees, kinds = Checkpoint(index, "", {}, []), {}, set()
    for name in names:
        if Path(name).name != name or name.endswith(".index.json"):
            raise CheckpointError(f"{index}: it names {name!r}, which is no shard beside it.")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index}: {name} is missing, which it names. Copy it again.")
        shard = _open_inside(folder, name)
        kinds.add(shard.format)
        trees[name] = shard.tree
        whole.files += shard.files
        whole.imports += shard.imports
        whole.classes += [kind for kind in shard.classes if kind not in whole.classes]
        whole.devices |= shard.devices
        whole.checksums |= shard.checksums
    pairs = [(key, name) for name, tree in trees.items() for key in tree]
    if homes is None:
        homes = dict(pairs)
        for key, name in [(key, name) for key, name in pairs if homes[key] != name][:1]:
            raise CheckpointError(
                f"{index}: {key!r:.80} is in {name} and in {homes[key]}, and there is no index. "
                "Copy its .index.json as well, or name one of the shards."
            )
    for key, name in homes.items():
        if key not in trees[name]:
            raise CheckpointError(f"{index}: {key!r:.80} is not in {name}. Copy both again.")
        whole.tree[key] = trees[name][key]
    whole.unlisted = [str(key) for key, name in pairs if homes.get(key) != name]
    whole.format = f"{len(names)} shards, {' and '.join(sorted(kinds))}"
    return whole


def _dict_of_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that is there twice, JSON's reader would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has {twice!r} twice")
    return found


def _what_else(path: Path, head: bytes, size: int) -> str:
    """What a file is that is no checkpoint, and what to do."""
    if not head.strip(b"\0"):
        what = "begins with nothing but zeros" if size else "is empty"
        return f"this file {what}: the program that wrote it was stopped. {AGAIN}"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page about the file, not the file: the link to download is another."
    if head.startswith(b"version https://git-lfs"):
        return "this is a Git-LFS pointer to the file, not the file: run `git lfs pull`."
    if tarfile.is_tarfile(path):
        return filled(WAYS["tar"], path)
    for start in [start for start in BEGINNINGS if head.startswith(start)]:
        return f"this is not a checkpoint of PyTorch but {filled(BEGINNINGS[start], path)}."
    if path.suffix == ".onnx" or ONNX.match(head):
        return filled(WAYS["onnx"], path)
    return f"neither torch.save nor safetensors writes files that begin with {head[:12]!r}."
