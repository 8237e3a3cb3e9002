"""Checkpoint files of every kind, made by the libraries that make them; shared by the tests."""

import argparse
import collections
import contextlib
import json
import os
import pickle
import sys
import tarfile
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.fx
from running import NO_CHECKSUMS
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim.swa_utils import AveragedModel


class Net(nn.Module):
    """Convolution, buffers, a list, and a submodule that is really called `module`."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.module = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])


class Tied(nn.Module):
    """The first and the last layer are one tensor, as in language models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


class Counting(nn.Linear):
    """A module whose state dict holds more than tensors."""

    def __init__(self, seen):
        super().__init__(2, 1)
        self.seen = seen

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Twice(nn.Module):
    """One layer is there under two names; it also knows the whole, as parts should not."""

    def __init__(self, knows=False):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = self.first
        if knows:
            self.first.whole = self


class Backbone(nn.Module):
    """A part that torch.fx can trace."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x)


class Traced(nn.Module):
    """A part of it has been through torch.fx, as torchvision's feature extractors have."""

    def __init__(self, trace=lambda part: part):
        super().__init__()
        self.backbone = trace(Backbone())
        self.head = nn.Linear(3, 1)


class Closed(nn.Linear):
    """A module that is pickled in a way of its own."""

    def __getstate__(self):
        return self.weight, self.bias


class Boom:
    """Unpickled by what it says, it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


class Rebuilt:
    """Pickled as two numbers of any dtype with any metadata, which need not be possible."""

    def __init__(self, dtype, metadata=None):
        self.about = 0, (2,), (1,), False, {}, dtype, metadata

    def __reduce__(self):
        numbers = torch.zeros(64, dtype=torch.uint8).untyped_storage()
        return torch._utils._rebuild_tensor_v3, (numbers, *self.about)


def net(kind=Net, *options):
    torch.manual_seed(7)
    return kind(*options)


def state(kind=Net):
    return net(kind).state_dict()


def same(model, other):
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def saved(folder, thing, name="x.pt", **options):
    torch.save(thing, folder / name, **options)
    return folder / name


def written(folder, data, name="model.pth"):
    (folder / name).write_bytes(data)
    return folder / name


OLD = {"_use_new_zipfile_serialization": False}
GOOD, BAD = {}, {}  # name -> (function of a folder that makes the file, what to expect)


def good(name=None, make=None, device="cpu", options=None, **expected):
    """Register a builder, or what `make` of a folder gives for ``torch.save``.

    `expected` has where the weights are, options for fix, and what inspect shall find.
    """

    def register(build):
        GOOD[name or build.__name__] = (build, {"at": "", "device": device} | expected)
        return build

    def build(folder):
        with mock.patch("torch.serialization.location_tag", return_value=device):
            return saved(folder, make(folder), **(options or {}))

    return register(build) if make else register


def bad(message, name=None, make=None, *, inspectable=False):
    """Register a builder, or what `make` of a folder gives, as bytes or for ``torch.save``.

    fix and load_into refuse with `message`; inspect too, unless said.
    """

    def register(build):
        BAD[name or build.__name__] = (build, message, inspectable)
        return build

    def build(folder):
        thing = make(folder)
        return (written if isinstance(thing, bytes) else saved)(folder, thing)

    return register(build) if make else register


# --- plain and wrapped --------------------------------------------------------------------------


@contextlib.contextmanager
def one_rank(backend="gloo", world_size=1):
    """A process group in this process; of the backend "fake", with ranks that are not there."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def with_inner(wrap):
    model = net()
    model.layers[1] = wrap(model.layers[1])
    return model.state_dict()


plain = good("plain", lambda _: state())
good("data_parallel", lambda _: DataParallel(net()).state_dict(), prefix="module.")
good("compiled_submodule", lambda _: with_inner(torch.compile), prefix="_orig_mod.")
good("data_parallel_submodule", lambda _: with_inner(DataParallel), needs_model=True)
good("averaged", lambda _: AveragedModel(net()).state_dict(), prefix="module.")
good("part_of_a_larger_model", needs_model=True, more=True,
     make=lambda _: nn.ModuleDict({"body": net(), "neck": net(Tied)}).state_dict())  # fmt: skip
good("opacus", lambda _: {f"_module.{key}": value for key, value in state().items()},
     prefix="_module.")  # fmt: skip
good("average_of_mmengine", prefix="module.",
     make=lambda _: {"steps": torch.tensor(3), **DataParallel(net()).state_dict()})  # fmt: skip
good("fsdp", lambda _: {f"_fsdp_wrapped_module.{key}": value for key, value in state().items()},
     prefix="_fsdp_wrapped_module.")  # fmt: skip


# --- under a key, beside other things ------------------------------------------------------------


def torchvision(folder):
    """As torchvision's references/classification/train.py saves."""
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    return {
        "model": state(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 30).state_dict(),
        "epoch": 4,
        "args": argparse.Namespace(data_path=Path("/datasets"), lr=np.float64(0.1)),
        "model_ema": {key: value + 1 for key, value in state().items()},
    }


def nano_gpt(folder):
    return {
        "model": torch.compile(net()).state_dict(),
        "optimizer": torch.optim.AdamW(net().parameters()).state_dict(),
        "model_args": {"n_layer": 2, "bias": False},
        "best_val_loss": torch.tensor(1.47),
        "config": {"out_dir": "out", "learning_rate": 6e-4},
    }


good("under_a_name_of_ones_own", lambda _: {"mine": state(), "loss": [0.5, 0.25]}, at="mine")
good("torchvision", torchvision, at="model", calls="argparse.Namespace")
good("nano_gpt", nano_gpt, at="model", prefix="_orig_mod.")
good("nested_twice", lambda _: {"model": {"state_dict": state(), "arch": "net"}},
     at="model.state_dict")  # fmt: skip


@good(at="state_dict", prefix="model.")
def lightning_checkpoint(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, rate=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.model = net()

    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=0, default_root_dir=folder,
                                enable_model_summary=False, **off)  # fmt: skip
    trainer.strategy.connect(Module())
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


# --- safetensors, shards, folders ----------------------------------------------------------------


@good()
def safetensors_file(folder, name="model.safetensors"):
    from safetensors.torch import save_file

    save_file(state(), folder / name)
    return folder / name


good("safetensors_of_any_name")(lambda folder: safetensors_file(folder, "weights.bin"))


@good(model=Tied)
def safetensors_of_tied_weights(folder):
    from safetensors.torch import save_model

    save_model(net(Tied), str(folder / "tied.safetensors"))
    return folder / "tied.safetensors"


@good()
def safetensors_with_a_note_that_names_a_stored_tensor(folder):
    from safetensors.torch import save_file

    notes = {"norm.weight": "layers.0.weight", "epoch": "conv.bias"}  # the second, by chance
    save_file(state(), folder / "x.safetensors", notes)
    return folder / "x.safetensors"


@good()
def shards(folder, **options):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(net()), folder, max_shard_size="1KB", **options)
    return folder


good("shards_by_index")(lambda folder: shards(folder) / "model.safetensors.index.json")
good("shards_of_torch_save")(lambda folder: shards(folder, safe_serialization=False))


@good()
def hugging_face_cache(folder):
    """Names in ``snapshots`` are links to files in ``blobs``."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "4d7a" / "unet"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(shards(blobs).iterdir())):
        (snapshot / path.name).symlink_to(f"../../../blobs/{number}")
        path.rename(blobs / str(number))
    return snapshot


@good()
def link_that_is_named(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "last.pt").symlink_to(plain(folder))
    return folder / "inner" / "last.pt"


@good()
def accelerate_state(folder):
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), net()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.save_state(str(folder))
    return folder


@good()
def folder_with_one_file(folder):
    (folder / "notes.txt").write_text("the best one")
    saved(folder, state(), "model.pth")
    return folder


# --- formats, devices, dtypes, sharing ------------------------------------------------------------


@good()
def without_checksums(folder):
    with NO_CHECKSUMS:
        return saved(folder, state())


legacy = good("legacy", lambda _: state(), options=OLD)
good("legacy_data_parallel_on_cuda", lambda _: {"state_dict": DataParallel(net()).state_dict()},
     at="state_dict", prefix="module.", device="cuda:1", options=OLD)  # fmt: skip
good("saved_on_cuda", lambda _: state(), device="cuda:7")
good("sets_of_protocol_4", at="model", options={"pickle_protocol": 4},
     make=lambda _: {"model": state(), "seen": {1, 2}, "kinds": frozenset("ab")})  # fmt: skip
good("tied_weights", lambda _: state(Tied), model=Tied)
good("tied_weights_under_one_name", model=Tied, needs_model=True,
     make=lambda _: {k: v for k, v in state(Tied).items() if k != "head.weight"})  # fmt: skip
good("called_safetensors")(lambda folder: saved(folder, state(), "x.safetensors"))


# --- things of other classes in it --------------------------------------------------------------


def classes_inside(folder):
    seen = collections.defaultdict(int, cats=3)
    labels = collections.Counter("abba")
    return {"model": state(), "seen": seen, "labels": labels, "at": range(3)}


def repacked(path, change):
    """The archive with each entry's bytes as `change` of its name and bytes gives them."""
    target = path.with_name("y.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


def with_steps(folder, steps):
    """Weights whose pickle first takes these steps; they leave nothing on its stack."""

    def change(name, data):  # after the protocol's number
        return data[:2] + steps + data[2:] if name.endswith("data.pkl") else data

    return repacked(plain(folder), change)


def hostile_model(folder):
    model = net()
    model.conv.extra = Boom(folder / "marker")
    return model


good("numpy_of_protocol_5", at="model", calls="numpy", options={"pickle_protocol": 5},
     make=lambda _: {"model": state(), "x": np.linspace(0, 1, 4)})  # fmt: skip
good("classes_inside", classes_inside, at="model", calls="builtins.range")
good("malicious_beside", lambda folder: {"model": state(), "it": Boom(folder / "marker")},
     at="model", calls="io.open")  # fmt: skip
good("imports_a_module", calls="marker_module.anything")(
    lambda folder: with_steps(folder, b"cmarker_module\nanything\n0")
)
good("sets_a_variable", calls="os.environ")(
    lambda folder: with_steps(folder, b"cos\nenviron\nX\x07\0\0\0HOSTILEX\x01\0\0\0" + b"1s0")
)
ema_beside = good("weights_at_the_top_with_others_beside", calls="argparse.Namespace",
    make=lambda _: {**state(), "ema": {k: v + 1 for k, v in state().items()},
                    "args": argparse.Namespace(lr=0.1)})  # fmt: skip

# --- made to be slow, or to fill the memory ------------------------------------------------------


MORE_IN_IT = {"needs_model": True, "more": True}
good("one_tensor_under_many_names", **MORE_IN_IT,
     make=lambda _: state() | dict.fromkeys("abcdefghijkl", torch.zeros(5_000_000)))  # fmt: skip
good("one_tensor_shown_four_times", **MORE_IN_IT,
     make=lambda _: state() | {"w": torch.zeros(18_000_000).expand(4, -1)})  # fmt: skip


WHOLE = {"calls": "kinds_of_files.Net", "holds": "a whole model, class kinds_of_files.Net"}
good("whole_model", lambda _: net(), **WHOLE)
good("whole_data_parallel", lambda _: DataParallel(net()), prefix="module.", calls=WHOLE["calls"])
good("whole_model_in_a_dict", lambda _: {"model": net().half(), "ema": None}, at="model",
     cast=torch.float16, **WHOLE)  # fmt: skip
good("malicious_whole_model", hostile_model, **WHOLE | {"calls": "io.open"})


def with_buffers_called(names):
    model = net()
    model.norm._non_persistent_buffers_set = names
    return model


for _names in (5, [[], torch.ones(3)]):
    good(f"whole_model_with_buffers_called_{_names!r:.9}", calls=WHOLE["calls"],
         make=lambda _, names=_names: with_buffers_called(names))  # fmt: skip
for _knows in (False, True):
    good(f"whole_model_with_a_shared_part{'_that_knows_it' * _knows}", calls="kinds_of_files.Twice",
         make=lambda _, knows=_knows: net(Twice, knows), model=Twice)  # fmt: skip
good("whole_model_with_a_traced_part", calls="torch.fx.graph_module.reduce_graph_module",
     make=lambda _: net(Traced, torch.fx.symbolic_trace), model=Traced)  # fmt: skip
good("whole_compiled_model", calls="torch._dynamo.eval_frame.OptimizedModule", prefix="_orig_mod.",
     make=lambda _: torch.compile(net()))  # fmt: skip
good("whole_model_with_a_compiled_part", calls="torch._dynamo.eval_frame.OptimizedModule",
     make=lambda _: net(Traced, torch.compile), model=Traced, prefix="_orig_mod.")  # fmt: skip
good("whole_model_that_was_traced", calls="torch.fx.graph_module.reduce_graph_module",
     make=lambda _: torch.fx.symbolic_trace(net(Backbone)), model=Backbone)  # fmt: skip
for _kind in ("typed", "untyped"):
    good(f"{_kind}_storage_beside", at="model", holds="it: a storage of 100,000,000 bytes",
         make=lambda _, kind=_kind: {"model": state(), "it": storage(kind)})  # fmt: skip


def storage(kind):
    found = torch.zeros(100_000_000, dtype=torch.uint8)
    return found.untyped_storage() if kind == "untyped" else found._typed_storage()


LONG = "K " * 500_000
good("long_key_above_many_dicts", at="model",
     make=lambda _: {"model": state(), LONG: {str(i): {"w": torch.ones(1)} for i in range(400)}},
)  # fmt: skip


# --- bad ----------------------------------------------------------------------------------------


def cut(path, keep):
    data = path.read_bytes()
    return written(path.parent, data[: int(keep * len(data))], path.name)


def zero(path, thing, length=64):
    """Write zeros over the numbers of `thing`."""
    data = path.read_bytes()
    at = data.find(thing.numpy().tobytes())
    assert at > 0
    return written(path.parent, data[:at] + bytes(length) + data[at + length :], path.name)


def header(text):
    """The beginning of a safetensors file."""
    return len(text).to_bytes(8, "little") + text


for _name, _message, _data in [
    ("empty_file", "is empty", b""),
    ("zeros", "nothing but zeros", bytes(10_000)),
    ("web_page", "a web page", b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title>"),
    ("lfs_pointer", "Git-LFS pointer to the file, not",
     b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 97781949\n"),
    ("text_of_an_error", "files that begin with b'Entry not fo'", b"Entry not found"),
    ("gzip_file", "gzip", b"\x1f\x8b\x08" + bytes(50)),
    ("keras_file", "HDF5", b"\x89HDF\r\n\x1a\n" + bytes(600)),
    ("numpy_file", "numpy.load", b"\x93NUMPY\x01\0" + bytes(600)),
    ("shape_that_overflows_with_no_number", "no tensor has the shape of 'w'",
     header(b'{"w": {"dtype": "F32", "shape": [0, %d], "data_offsets": [0, 0]}}' % 2**62)),
    ("key_twice_in_a_header", "it has 'w' twice",
     header(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
            b'"w": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}') + bytes(4)),
    # ] (list), memo 0, get 0, append, and no STOP
    ("list_that_holds_itself_and_ends", "damaged", b"\x80\x02]q\0h\0a"),
    ("memory_index_of_4_billion", "damaged", b"\x80\x02]r\xff\xff\xff\xffj\x01\0\0\xff."),
]:  # fmt: skip
    bad(_message, _name, lambda _, data=_data: data)

NONE = "no state dict in it"
bad("was pickled by pickle.dump", "pickled", inspectable=True,
    make=lambda _: pickle.dumps({"model": state()}))  # fmt: skip
bad("arrays by joblib.dump", "joblib_of_arrays",
    lambda _: b"\x80\x02cjoblib.numpy_pickle\nNumpyArrayWrapper\n0\xff\x03")  # fmt: skip
ARRAYS = {"w": np.ones(3), "lr": np.float32(0.1)}
bad("['blobs'] (or", "arrays_in_a_pickle", inspectable=True,
    make=lambda _: pickle.dumps({"blobs": ARRAYS, "cfg": "x"}, 2))  # fmt: skip
bad("NumPy's arrays: if", "arrays_saved_by_torch", lambda _: ARRAYS, inspectable=True)


def long_name_above_many_weights(_):
    model = nn.Sequential(nn.Linear(2, 1))
    for number in range(1000):
        model[0].register_buffer(f"b{number}", torch.ones(1))
    model._modules = {LONG: model[0]}
    return model


class Packed:
    """Pickled as an object of C++, in which quantized layers keep their weights."""

    def __reduce__(self):
        return torch.ScriptObject, ()


def with_packed_weights(module):
    module.packed = Packed()
    return module


def parts_that_share_parts(_):
    """Forty modules have a name for each way through the two names of every one."""
    model = nn.Linear(1, 1)
    for _ in range(40):
        above = nn.Module()
        above.a = above.b = model
        model = above
    return model


def two_tensors_of_one_name(_):
    model = net()
    model._parameters["layers.0.weight"] = model.layers[1].weight
    return model


for _name, _message, _make in [
    ("malicious_alone", NONE, lambda folder: Boom(folder / "marker")),
    ("malicious_pickle", NONE, lambda folder: pickle.dumps({"a": Boom(folder / "marker")})),
    # } (dict), 1, forty times: memo 0, get 0, a tuple of both; then None, set the item
    ("tuples_that_double", NONE, lambda _: b"\x80\x02}K\x01" + b"q\0h\0\x86" * 40 + b"Ns."),
    ("list_that_holds_itself", NONE, lambda _: b"\x80\x02]q\0h\0a."),
    ("lists_nested_deep", f"{NONE}, but list of 1",
     lambda _: b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."),
    ("integer_of_5000_digits", NONE, lambda _: pickle.dumps({"a": 10**5000})),
    ("empty_dict", f"{NONE}, but dict of 0", lambda _: {}),
    ("one_tensor", f"{NONE}, but tensor", lambda _: torch.ones(3)),
    ("list_of_tensors", f"{NONE}, but 2 tensors without", lambda _: [torch.ones(3), torch.ones(3)]),
    ("optimizer_alone", f"{NONE}, but optimizer state",
     lambda _: torch.optim.Adam(net().parameters()).state_dict()),
    ("several_models", "several state dicts in it ('generator', 'discriminator')",
     lambda _: {"generator": state(), "discriminator": state()}),
    ("clash_after_stripping", "would be one key",
     lambda _: state() | {f"_orig_mod.{k}": v for k, v in state().items()}),
    ("two_dicts_of_one_name", "two state dicts are called 'model.old'",
     lambda _: {"model.old": state(), "model": {"old": state(), "loss": 0.5}}),
    ("whole_model_with_two_tensors_of_one_name", "two tensors are called 'layers.0.weight'",
     two_tensors_of_one_name),
    ("long_name_above_many_weights", "more names than any model's", long_name_above_many_weights),
    ("whole_model_with_a_part_of_odd_state", "'1' is kinds_of_files.Closed object, whose weights",
     lambda _: nn.Sequential(nn.Linear(2, 2), Closed(2, 2))),
    ("whole_model_of_packed_weights", "that can be read, but 0.packed (torch.ScriptObject",
     lambda _: nn.Sequential(with_packed_weights(nn.ReLU()))),
    ("whole_model_without_weights", "no weights in it that can be read", lambda _: nn.ReLU()),
    ("parts_that_share_parts", "more names than any model's", parts_that_share_parts),
    ("sparse_tensor", "to_dense()", lambda _: state() | {"extra": torch.eye(3).to_sparse()}),
    ("meta_tensors", "of the meta device",
     lambda _: state() | {"extra": torch.empty(3, device="meta")}),
    ("quantized_by_its_dtype", "dequantize()", lambda _: state() | {"extra": Rebuilt(torch.qint8)}),
    ("conjugate_of_real_numbers", "save a plain one",
     lambda _: state() | {"extra": Rebuilt(torch.float32, {"conj": True})}),
    ("quantized_tensor", "dequantize()",
     lambda _: state() | {"extra": torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8)}),
]:  # fmt: skip
    bad(_message, _name, _make, inspectable=True)
bad("a folder; name a checkpoint in it (it is empty)", "empty_folder")(lambda folder: folder)
bad("the end of the file is missing", "truncated")(lambda folder: cut(plain(folder), 0.6))
bad("cut off", "truncated_legacy")(lambda folder: cut(legacy(folder), 0.95))
bad("cut off", "truncated_safetensors")(lambda folder: cut(safetensors_file(folder), 0.9))
bad("the numbers of 'conv.weight' are not those that were saved", "zeros_in_the_middle")(
    lambda folder: zero(plain(folder), net().conv.weight.detach())
)
bad("conv.weight' are not those that were saved", "zeros_beside_an_optimizer")(
    lambda folder: zero(saved(folder, nano_gpt(folder)), net().conv.weight.detach())
)


@bad(NONE, inspectable=True)
def malicious_legacy(folder):
    return saved(folder, [Boom(folder / "marker")], **OLD)


bad("NumPy's .npz, not a file of torch.save. numpy.load(", "other_zip")(
    lambda folder: np.savez(folder / "x.npz", a=np.ones(3)) or folder / "x.npz"
)


@bad("it holds 'run 7/x.pt'. Unpack it, and name what is in it")
def zip_around_a_file(folder):
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        archive.write(plain(folder), "run 7/x.pt")
    return folder / "x.zip"


@bad("its entries are compressed")
def packed_entry_beside(folder):
    with zipfile.ZipFile(plain(folder), "a", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x/bomb", bytes(10**6))
    return folder / "x.pt"


TWO = "listed twice"
# What zipfile would read is the second; PyTorch goes to the first, which the end names.
bad(TWO, "zip_after_a_zip")(lambda folder: written(folder, 2 * plain(folder).read_bytes(), "x.pt"))


@bad(TWO)
def old_zip_after_a_zip(folder):
    data = repacked(plain(folder), lambda _, data: data).read_bytes()
    (folder / "y.pt").unlink()
    return written(folder, data[:-22] + data, "x.pt")


@bad(TWO)
def zip_with_two_entries_of_one_name(folder):
    with zipfile.ZipFile(plain(folder), "a") as archive:
        archive.writestr("x/DATA/0", bytes(432))  # PyTorch takes it for x/data/0
    return folder / "x.pt"


@bad("TorchScript")
def torch_script(folder):
    torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2)).save(folder / "x.pt")
    return folder / "x.pt"


@bad("Bad CRC-32 for file")
def bit_flip_in_the_names(folder):
    data = plain(folder).read_bytes()
    return written(folder, data.replace(b"conv.weight", b"conv.weighu", 1), "x.pt")


@bad("damaged")
def tensor_beyond_its_storage(folder):
    """What CVE-2026-24747 was about: a shape that reaches behind the numbers."""
    # conv.bias: 4 elements become 200
    return repacked(plain(folder), lambda _, data: data.replace(b"K\0K\x04\x85", b"K\0K\xc8\x85"))


@bad("storages are used that the file does not list")
def legacy_that_would_show_what_was_in_memory(folder):
    data = legacy(folder).read_bytes()
    names = data.rindex(b"]q\0(")
    return written(folder, data[:names] + b"]" + data[data.index(b"e.", names) + 1 :])


def text(letters):
    return b"X" + len(letters).to_bytes(4, "little") + letters


# conv.weight's, of 108 numbers: in a tuple, for persistent_load; then a tensor but for its shape.
STORAGE = b"(%b" % text(b"storage") + b"ctorch\nFloatStorage\n%b%bKltQ" % (text(b"0"), text(b"cpu"))
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0%b%b\x89NtR"
ROWS = TENSOR % (b"M\x40\x1f\x85", b"K\0\x85") + b"q\x01"
MORE = "it makes far more than it holds"
for _name, _message, _steps in [
    # The function is memo 1, what it copies memo 2.
    ("list_copied_a_thousand_times", MORE,
     b"cbuiltins\nlist\nq\x010](%beq\x020" % (b"N" * 10_000) + b"h\1h\2\x85R0" * 1000),
    # Memo 1 is a tensor of 8,000 rows in one number.
    ("tensor_unpacked", MORE,
     ROWS + b"0cbuiltins\nlist\nh\1\x85R0"),
    ("storage_longer_than_its_entry", "432 bytes under 0, not 480",
     STORAGE.replace(b"Kl", b"Kx") + b"0"),
    ("bytes_that_are_not_there", "EOFError", b"\x96" + (2**31).to_bytes(8, "little")),
    ("tensor_of_65_dimensions", "of 65 dimensions",
     TENSOR % ((b"(%bt" % (b"K\1" * 65),) * 2) + b"0"),
    ("tensor_that_overflows", "a tensor of shape (2147483648, 2147483648)",
     TENSOR % (b"\x8a\x05\0\0\0\x80\0" * 2 + b"\x86", b"K\0K\0\x86") + b"0"),
]:  # fmt: skip
    bad(_message, _name)(lambda folder, steps=_steps: with_steps(folder, steps))


@bad("an item set in what is no dict")
def items_set_in_a_tensor_without_end(folder):
    path = saved(folder, {"w": torch.zeros(1, 1).expand(2, 10**15)})
    # REDUCE makes the tensor; then get item 0 set
    return repacked(path, lambda _, data: data.replace(b"Rq", b"RK\0K\0sq"))


@bad("do not begin where the processor")
def complex_numbers_at_an_odd_place(folder):
    path = saved(folder, state() | {"extra": torch.ones(3, dtype=torch.complex128)})
    return repacked(path, lambda _, data: data)


@bad("numbers are in another processor's byte order")
def of_another_processor(folder):
    other = {"little": b"big", "big": b"little"}[sys.byteorder]
    return repacked(plain(folder), lambda name, data: other if "byteorder" in name else data)


for _name, *_files in [
    ("folder_with_two_files", "a.pt", "b.pt"),
    ("two_models_of_accelerates", "model.safetensors", "model_1.safetensors", "optimizer.bin"),
    ("averages_beside_the_weights", "averages.pth", "last.pth.tar"),
]:
    bad(f"name a checkpoint in it ({', '.join(_files)})", _name)(
        lambda folder, files=_files: [saved(folder, state(), name) for name in files] and folder
    )


@bad("makes one model of it: python ")
def deep_speed(folder):
    return written(folder, b"", "zero_to_fp32.py").parent


@bad("an unpacked torch.save file")
def unpacked(folder):
    with zipfile.ZipFile(plain(folder)) as archive:
        archive.extractall(folder)
    return folder / "x"


@bad("which it names")
def missing_shard(folder):
    sorted(shards(folder).glob("*.safetensors"))[1].unlink()
    return folder


def index(folder, homes, name="model.safetensors.index.json"):
    return written(folder, json.dumps(homes).encode(), name)


bad("which is no shard beside it", "index_in_an_index")(
    lambda folder: index(folder, {"weight_map": {"w": "b.index.json"}}, "a.index.json")
)


@bad("which is no shard beside it")
def shard_outside_the_folder(folder):
    safetensors_file(folder)
    (folder / "inner").mkdir()
    return index(folder / "inner", {"weight_map": {"conv.weight": "../model.safetensors"}})


@bad("'fc.weight' is not in model.safetensors. Copy both again.")
def key_not_in_its_shard(folder):
    safetensors_file(folder)
    return index(folder, {"weight_map": {"fc.weight": "model.safetensors"}})


@bad("'conv.weight' twice")
def index_with_two_homes_for_a_key(folder):
    safetensors_file(folder)
    safetensors_file(folder, "old.safetensors")
    homes = b'"conv.weight": "model.safetensors", "conv.weight": "old.safetensors"'
    return written(folder, b'{"weight_map": {%b}}' % homes, "model.safetensors.index.json")


@bad("a device, pipe or socket")
def pipe(folder):
    os.mkfifo(folder / "x.pt")
    return folder / "x.pt"


INDEX = "model.safetensors.index.json"


@bad("a device, pipe or socket")
def index_that_is_a_pipe(folder):
    os.mkfifo(folder / INDEX)
    return folder


def linked(folder, target, name):
    (folder / "inner").mkdir(exist_ok=True)
    (folder / "inner" / name).symlink_to(target)
    return folder / "inner"


bad("link out of its folder", "index_that_is_a_link")(lambda f: linked(f, "/dev/zero", INDEX))
bad("link out of its folder", "weights_that_are_a_link")(lambda f: linked(f, plain(f), "x.pt"))


@bad("'conv.weight' is in m-00001-of-00002.bin and in m-00002-of-00002.bin")
def shards_that_share_a_key_without_an_index(folder):
    for number in "12":
        saved(folder, state(), f"m-0000{number}-of-00002.bin")
    return folder


@bad("link out of its folder")
def shard_that_is_a_link(folder):
    inner = linked(folder, safetensors_file(folder), "a.safetensors")
    return index(inner, {"weight_map": {"conv.weight": "a.safetensors"}}).parent


bad("damaged", "index_with_a_list")(lambda f: index(plain(f).parent, {"weight_map": ["x.pt"]}))


@bad("of torch.distributed.checkpoint")
def distributed_checkpoint(folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": state()}, checkpoint_id=folder, no_dist=True)
    return folder


for _name in (".metadata", "__0_0.distcp"):
    bad("a part of ", _name)(lambda folder, name=_name: distributed_checkpoint(folder) / name)


@bad("a tar archive, as NeMo's .nemo is")
def nemo(folder):
    with tarfile.open(folder / "x.nemo", "w:gz") as archive:
        archive.add(plain(folder), "./model_weights.ckpt")
    return folder / "x.nemo"


@bad("a tar archive")
def tar_archive(folder):
    """A legacy format that torch.load would unpack; its first name makes it look like a pickle."""
    options = {"format": tarfile.GNU_FORMAT, "encoding": "latin1"}
    with tarfile.open(folder / "x.pt", "w", **options) as archive:
        archive.addfile(tarfile.TarInfo("\x80\x02"))
    return folder / "x.pt"
