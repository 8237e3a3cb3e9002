"""Checkpoint files of every kind, made by the libraries that make them; shared by the tests."""

import argparse
import json
import os
import pickle
import tarfile
import zipfile
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


class Net(nn.Module):
    """Convolution, buffers, a list, and a submodule that is really called `module`."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.module = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])


class Small(nn.Module):
    """Without a submodule called `module`, for libraries that take every one for a wrapper's."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)


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


def net(kind=Net):
    torch.manual_seed(7)
    return kind()


class Boom:
    """Unpickled by what it says, it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


GOOD, BAD = {}, {}  # name -> (function of a folder that makes the file, what to expect)


def good(**expected):
    """Register a builder; `expected` has options for fix, and what inspect shall find."""

    def register(build):
        GOOD[build.__name__] = (build, expected)
        return build

    return register


def bad(message, *, inspectable=False):
    """Register a builder; fix and load_into refuse with `message`; inspect too, unless said."""

    def register(build):
        BAD[build.__name__] = (build, message, inspectable)
        return build

    return register


def saved(folder, thing, name="x.pt", **options):
    torch.save(thing, folder / name, **options)
    return folder / name


def on_cuda(folder, thing, device="cuda:0"):
    with mock.patch("torch.serialization.location_tag", return_value=device):
        return saved(folder, thing)


# --- plain and wrapped --------------------------------------------------------------------------


@good(at="")
def plain(folder):
    return saved(folder, net().state_dict())


@good(at="")
def plain_with_parameters_that_require_grad(folder):
    return saved(folder, {**dict(net().named_parameters()), **dict(net().named_buffers())})


@good(at="", prefix="module.")
def data_parallel(folder):
    return saved(folder, DataParallel(net()).state_dict())


def in_ddp(model):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return DistributedDataParallel(model)


@good(at="model", prefix="module.")
def ddp_with_optimizer(folder):
    model = in_ddp(net())
    try:
        optimizer = torch.optim.AdamW(model.parameters())
        sum(p.sum() for p in model.parameters()).backward()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer.step()
        state = {"model": before, "optimizer": optimizer.state_dict(), "epoch": 3}
        return saved(folder, state)
    finally:
        dist.destroy_process_group()


@good(at="", prefix="_orig_mod.")
def compiled(folder):
    return saved(folder, torch.compile(net()).state_dict())


@good(at="")
def compiled_in_place(folder):
    model = net()
    model.compile()
    return saved(folder, model.state_dict())


@good(at="", prefix="_orig_mod.module.")
def compiled_data_parallel(folder):
    return saved(folder, torch.compile(DataParallel(net())).state_dict())


@good(at="", prefix="module._orig_mod.")
def data_parallel_of_compiled(folder):
    return saved(folder, DataParallel(torch.compile(net())).state_dict())


@good(at="", prefix="_orig_mod.")
def compiled_submodule(folder):
    model = net()
    model.layers[1] = torch.compile(model.layers[1])
    return saved(folder, model.state_dict())


@good(at="", prefix="_orig_mod.module._orig_mod.")
def wrapped_three_times(folder):
    model = torch.compile(DataParallel(torch.compile(net())))
    return saved(folder, model.state_dict())


@good(at="", needs_model=True)
def data_parallel_submodule(folder):
    model = net()
    model.layers[1] = DataParallel(model.layers[1])
    return saved(folder, model.state_dict())


@good(at="", prefix="module.")
def averaged_model(folder):
    return saved(folder, AveragedModel(net()).state_dict())


@good(at="", prefix="module.module.")
def averaged_data_parallel(folder):
    return saved(folder, AveragedModel(DataParallel(net())).state_dict())


@good(at="", prefix="module.")
def averaged_with_buffers(folder):
    return saved(folder, AveragedModel(net(), use_buffers=True).state_dict())


@good(at="", needs_model=True)
def part_of_a_larger_model(folder):
    whole = nn.ModuleDict({"backbone": net(), "neck": nn.Linear(2, 2)})
    return saved(folder, whole.state_dict())


@good(at="", prefix="_fsdp_wrapped_module.")
def fsdp_names(folder):
    state = {f"_fsdp_wrapped_module.{k}": v for k, v in net().state_dict().items()}
    return saved(folder, state)


@good(at="", prefix="_checkpoint_wrapped_module.")
def activation_checkpointing(folder):
    model = net()
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    # Its own hook takes the segment out again; older files have it.
    wrapped = checkpoint_wrapper.checkpoint_wrapper(model.conv)
    assert list(wrapped.state_dict()) == ["weight", "bias"]
    state = {k.replace("conv.", "conv._checkpoint_wrapped_module.", 1): v
             for k, v in model.state_dict().items()}  # fmt: skip
    return saved(folder, state)


# --- under a key, beside other things ------------------------------------------------------------


def _under(key):
    def build(folder):
        return saved(folder, {key: net().state_dict(), "epoch": 12, "loss": [0.5, 0.25]})

    GOOD[f"under_{key}"] = (build, {"at": key})


for _key in ("state_dict", "model_state_dict", "model", "net", "ema", "weights_of_mine"):
    _under(_key)


@good(at="model", calls="argparse.Namespace")
def torchvision_references(folder):
    """As torchvision's references/classification/train.py saves."""
    model, averaged = net(), AveragedModel(nn.Sequential(net()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        "epoch": 4,
        "args": argparse.Namespace(data_path=Path("/datasets"), lr=0.1),
        "model_ema": averaged.state_dict(),
    }
    return saved(folder, state)


def _timm(folder, averaged):
    import timm.utils

    model, other = net(Small), net(Small)
    with torch.no_grad():  # the one that is not looked for is another
        for parameter in (model if averaged else other).parameters():
            parameter.add_(1)
    ema = timm.utils.ModelEmaV2(other)
    saver = timm.utils.CheckpointSaver(
        model, torch.optim.SGD(model.parameters(), 0.1), model_ema=ema,
        checkpoint_dir=str(folder), recovery_dir=str(folder),
        args=argparse.Namespace(model="net", lr=np.float64(0.1)),
    )  # fmt: skip
    saver.save_checkpoint(3, metric=0.75)
    return folder / "checkpoint-3.pth.tar"


@good(at="state_dict", calls="argparse.Namespace", model=Small)
def timm_checkpoint(folder):
    return _timm(folder, averaged=False)


@good(at="state_dict_ema", key="state_dict_ema", inspect_at="state_dict", model=Small)
def timm_averaged(folder):
    return _timm(folder, averaged=True)


@good(at="model", prefix="_orig_mod.")
def nano_gpt(folder):
    state = {
        "model": torch.compile(net()).state_dict(),
        "optimizer": torch.optim.AdamW(net().parameters()).state_dict(),
        "model_args": {"n_layer": 2, "bias": False},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.47),
        "config": {"out_dir": "out", "learning_rate": 6e-4},
    }
    return saved(folder, state)


@good(at="model.state_dict")
def nested_twice(folder):
    return saved(folder, {"model": {"state_dict": net().state_dict(), "arch": "net"}, "epoch": 1})


@good(at="state_dict", prefix="model.")
def lightning_checkpoint(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, rate=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.model = net()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.hparams.rate)

    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=0, default_root_dir=folder,
                                enable_model_summary=False, **off)  # fmt: skip
    trainer.strategy.connect(Module())
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


@good(at="model")
def written_by_save_checkpoint(folder):
    from torchladder import checkpoint

    model = net()
    parts = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    return checkpoint.save(folder, parts, step=7)


# --- safetensors, shards, folders ----------------------------------------------------------------


@good(at="")
def safetensors_file(folder):
    from safetensors.torch import save_file

    save_file(net().state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


@good(at="")
def safetensors_with_any_name(folder):
    return safetensors_file(folder).rename(folder / "weights.bin")


@good(at="", model=Tied)
def safetensors_of_tied_weights(folder):
    from safetensors.torch import save_model

    save_model(net(Tied), str(folder / "tied.safetensors"))
    return folder / "tied.safetensors"


def _accelerate(folder, **options):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(net()), folder, **options)


@good(at="")
def accelerate_model(folder):
    _accelerate(folder)
    return folder / "model.safetensors"


@good(at="")
def accelerate_shards(folder):
    _accelerate(folder, max_shard_size="1KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@good(at="")
def accelerate_shards_by_index(folder):
    return accelerate_shards(folder) / "model.safetensors.index.json"


@good(at="")
def accelerate_shards_of_torch_save(folder):
    _accelerate(folder, max_shard_size="1KB", safe_serialization=False)
    return folder


@good(at="")
def accelerate_state(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.save_state(str(folder))
    return folder


@good(at="")
def folder_with_one_file(folder):
    (folder / "notes.txt").write_text("the best one")
    saved(folder, net().state_dict(), "model.pth")
    return folder


# --- formats, devices, dtypes, sharing ------------------------------------------------------------


@good(at="")
def legacy(folder):
    return saved(folder, net().state_dict(), _use_new_zipfile_serialization=False)


@good(at="state_dict", prefix="module.", device="cuda:1")
def legacy_data_parallel_on_cuda(folder):
    state = {"state_dict": DataParallel(net()).state_dict(), "epoch": 90}
    with mock.patch("torch.serialization.location_tag", return_value="cuda:1"):
        return saved(folder, state, _use_new_zipfile_serialization=False)


@good(at="")
def without_checksums(folder):
    torch.serialization.set_crc32_options(False)
    try:
        return saved(folder, net().state_dict())
    finally:
        torch.serialization.set_crc32_options(True)


@good(at="", device="cuda:0")
def saved_on_cuda(folder):
    return on_cuda(folder, net().state_dict())


@good(at="", device="cuda:7", prefix="module.")
def saved_on_a_gpu_that_is_not_here(folder):
    return on_cuda(folder, DataParallel(net()).state_dict(), "cuda:7")


@good(at="", device="mps")
def saved_on_a_mac(folder):
    return on_cuda(folder, net().state_dict(), "mps")


@good(at="", cast=torch.float16)
def half_precision(folder):
    return saved(folder, net().half().state_dict())


@good(at="", cast=torch.bfloat16)
def bfloat16(folder):
    return saved(folder, net().bfloat16().state_dict())


@good(at="", cast=torch.float8_e4m3fn)
def float8(folder):
    return saved(folder, net().to(torch.float8_e4m3fn).state_dict())


@good(at="", cast=torch.complex64)
def complex_numbers(folder):
    return saved(folder, net().to(torch.complex64).state_dict())


@good(at="", model=Tied)
def tied_weights(folder):
    return saved(folder, net(Tied).state_dict())


@good(at="", model=Tied, needs_model=True)
def tied_weights_under_one_name(folder):
    state = net(Tied).state_dict()
    del state["head.weight"]
    return saved(folder, state)


@good(at="", oversized="conv.bias")
def slice_of_a_large_tensor(folder):
    state = net().state_dict()
    large = torch.zeros(100_000)
    large[5:9] = state["conv.bias"]
    return saved(folder, state | {"conv.bias": large[5:9]})


@good(at="")
def views_of_one_buffer(folder):
    state = net().state_dict()
    state.pop("norm.num_batches_tracked")
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    at = 0
    for key, tensor in state.items():
        state[key] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    return saved(folder, state | {"norm.num_batches_tracked": torch.tensor(0)})


@good(at="")
def channels_last(folder):
    return saved(folder, net().to(memory_format=torch.channels_last).state_dict())


@good(at="")
def expanded(folder):
    state = net().state_dict()
    return saved(folder, state | {"norm.weight": torch.ones(1).expand(4)})


@good(at="")
def tensor_with_attributes(folder):
    state = dict(net().state_dict())
    state["conv.weight"].note = "from the first run"
    return saved(folder, state)


# --- things of other classes in it --------------------------------------------------------------


@good(at="model", calls="numpy")
def numpy_inside(folder):
    things = {"best": np.float32(0.5), "losses": np.linspace(0, 1, 4), "n": np.int64(3)}
    return saved(folder, {"model": net().state_dict()} | things)


@good(at="model", calls="builtins.range")
def classes_inside(folder):
    from collections import Counter

    seen = defaultdict(int, cats=3)
    state = {"model": net().state_dict(), "seen": seen, "labels": Counter("abba"), "at": range(3)}
    return saved(folder, state)


@good(at="model", calls="io.open")
def malicious_beside_the_weights(folder):
    return saved(folder, {"model": net().state_dict(), "config": Boom(folder / "marker")})


def with_steps(folder, steps):
    """Weights whose pickle first takes these steps; they leave nothing on its stack."""
    with zipfile.ZipFile(plain(folder)) as old, zipfile.ZipFile(folder / "y.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                data = data[:2] + steps + data[2:]  # after the protocol's number
            new.writestr(name, data)
    return folder / "y.pt"


@good(at="", calls="marker_module.anything")
def weights_that_import_a_module(folder):
    return with_steps(folder, b"cmarker_module\nanything\n0")


@good(at="", calls="os.environ")
def weights_that_set_a_variable(folder):
    return with_steps(folder, b"cos\nenviron\nX\x07\0\0\0HOSTILEX\x01\0\0\0" + b"1s0")


@good(at="", calls="argparse.Namespace")
def weights_at_the_top_with_others_beside(folder):
    averaged = {k: v + 1 for k, v in net().state_dict().items()}
    things = {"ema": averaged, "args": argparse.Namespace(lr=0.1)}
    return saved(folder, {**net().state_dict(), **things})


@good(at="", calls="checkpoint_files.Net", holds="a whole model, class checkpoint_files.Net")
def whole_model(folder):
    return saved(folder, net())


@good(at="", calls="checkpoint_files.Net", prefix="module.")
def whole_data_parallel_model(folder):
    return saved(folder, DataParallel(net()))


@good(
    at="model",
    calls="checkpoint_files.Net",
    holds="a whole model, class checkpoint_files.Net",
    cast=torch.float16,
)
def whole_model_in_a_dict(folder):
    return saved(folder, {"model": net().half(), "epoch": 3, "ema": None})


@good(at="", calls="checkpoint_files.Net", holds="a whole model, class checkpoint_files.Net")
def whole_legacy_model(folder):
    return saved(folder, net(), _use_new_zipfile_serialization=False)


@good(at="", calls="io.open", holds="a whole model, class checkpoint_files.Net")
def malicious_whole_model(folder):
    state = net()
    state.conv.extra = Boom(folder / "marker")
    return saved(folder, state)


# --- bad ----------------------------------------------------------------------------------------


def written(folder, data, name="model.pth"):
    (folder / name).write_bytes(data)
    return folder / name


@bad("is empty")
def empty_file(folder):
    return written(folder, b"")


@bad("nothing but zeros")
def zeros(folder):
    return written(folder, bytes(10_000))


@bad("a web page")
def html_page(folder):
    return written(folder, b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title>")


@bad("Git-LFS pointer to the file of 97.8 MB")
def lfs_pointer(folder):
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 97781949\n"
    return written(folder, text)


@bad("files that begin with b'Entry not fo'")
def text_of_an_error(folder):
    return written(folder, b"Entry not found")


@bad("gzip")
def gzip_file(folder):
    return written(folder, b"\x1f\x8b\x08" + bytes(50))


@bad("HDF5")
def keras_file(folder):
    return written(folder, b"\x89HDF\r\n\x1a\n" + bytes(600))


@bad("numpy.load")
def numpy_file(folder):
    np.save(folder / "x.npy", np.ones(3))
    return folder / "x.npy"


@bad("not one of torch.save")
def other_zip(folder):
    np.savez(folder / "x.npz", a=np.ones(3))
    return folder / "x.npz"


@bad("its entries are compressed")
def compressed_zip(folder):
    deflated = zipfile.ZipFile(folder / "y.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(plain(folder)) as old, deflated as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return folder / "y.pt"


@bad("TorchScript")
def torch_script(folder):
    torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2)).save(folder / "x.pt")
    return folder / "x.pt"


@bad("big-endian")
def big_endian(folder):
    with zipfile.ZipFile(plain(folder)) as old, zipfile.ZipFile(folder / "y.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    return folder / "y.pt"


def cut(path, keep=0.6):
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    return path


@bad("cut off")
def truncated(folder):
    return cut(plain(folder))


@bad("cut off")
def truncated_legacy(folder):
    return cut(legacy(folder), 0.95)


@bad("cut off")
def truncated_safetensors(folder):
    return cut(safetensors_file(folder), 0.9)


@bad("damaged")
def truncated_in_the_header(folder):
    return cut(safetensors_file(folder), 0.1)


def zero(path, thing, length=64):
    """Write zeros over the numbers of `thing`."""
    data = path.read_bytes()
    at = data.find(thing.numpy().tobytes())
    assert at > 0
    path.write_bytes(data[:at] + bytes(length) + data[at + length :])
    return path


@bad("the numbers of 'conv.weight' are not those that were saved")
def zeros_in_the_middle(folder):
    return zero(plain(folder), net().conv.weight.detach())


@bad("conv.weight' are not those that were saved")
def zeros_beside_an_optimizer(folder):
    return zero(nano_gpt(folder), net().conv.weight.detach())


@bad("Bad CRC-32 for file")
def bit_flip_in_the_names(folder):
    path = plain(folder)
    data = bytearray(path.read_bytes())
    data[data.find(b"conv.weight")] ^= 1
    path.write_bytes(data)
    return path


@bad("no state dict in it", inspectable=True)
def malicious_alone(folder):
    return saved(folder, Boom(folder / "marker"))


@bad("no state dict in it", inspectable=True)
def malicious_legacy(folder):
    return saved(folder, [Boom(folder / "marker")], _use_new_zipfile_serialization=False)


@bad("no state dict in it", inspectable=True)
def malicious_pickle(folder):
    return written(folder, pickle.dumps({"state_dict": Boom(folder / "marker")}))


@bad("would be one key", inspectable=True)
def clash_after_stripping(folder):
    state = net().state_dict()
    return saved(folder, state | {f"_orig_mod.{k}": v for k, v in state.items()})


@bad("no state dict in it, but tensor", inspectable=True)
def one_tensor(folder):
    return saved(folder, torch.ones(3))


@bad("no state dict in it, but list of 2", inspectable=True)
def list_of_tensors(folder):
    return saved(folder, [torch.ones(3), torch.ones(3)])


@bad("no state dict in it, but optimizer state", inspectable=True)
def optimizer_alone(folder):
    return saved(folder, torch.optim.Adam(net().parameters()).state_dict())


@bad("several state dicts in it ('generator', 'discriminator')", inspectable=True)
def several_models(folder):
    return saved(folder, {"generator": net().state_dict(), "discriminator": net().state_dict()})


@bad("to_dense()", inspectable=True)
def sparse_tensor(folder):
    return saved(folder, net().state_dict() | {"extra": torch.eye(3).to_sparse()})


@bad("on the meta device", inspectable=True)
def meta_tensors(folder):
    return saved(folder, net().state_dict() | {"extra": torch.empty(3, device="meta")})


@bad("a folder; name a checkpoint in it (it is empty)")
def empty_folder(folder):
    return folder


@bad("a folder; name a checkpoint in it (a.pt, b.pt)")
def folder_with_two_files(folder):
    saved(folder, net().state_dict(), "a.pt")
    saved(folder, net().state_dict(), "b.pt")
    return folder


@bad("Run the zero_to_fp32.py in it")
def deep_speed(folder):
    (folder / "zero_to_fp32.py").write_text("")
    (folder / "global_step10").mkdir()
    return folder


@bad("an unpacked torch.save file")
def unpacked(folder):
    with zipfile.ZipFile(plain(folder)) as archive:
        archive.extractall(folder)
    return folder / "x"


@bad("which it names")
def missing_shard(folder):
    accelerate_shards(folder)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    return folder


def index(folder, homes):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


@bad("which is not a file beside it")
def shard_outside_the_folder(folder):
    safetensors_file(folder)
    (folder / "inner").mkdir()
    return index(folder / "inner", {"conv.weight": "../model.safetensors"})


@bad("'fc.weight' is not in model.safetensors")
def key_not_in_its_shard(folder):
    safetensors_file(folder)
    return index(folder, {"fc.weight": "model.safetensors"})


@bad("damaged")
def index_without_a_map(folder):
    return written(folder, b"{}", "model.safetensors.index.json")


def header(folder, entries, data=b"", length=None):
    text = json.dumps(entries).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    return written(folder, size + text + data, "x.safetensors")


@bad("cut off")
def header_longer_than_the_file(folder):
    return header(folder, {}, length=10**15)


@bad("damaged")
def shape_larger_than_the_data(folder):
    entry = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}
    return header(folder, {"w": entry}, bytes(8))


@bad("damaged")
def negative_offsets(folder):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}
    return header(folder, {"w": entry}, bytes(8))


@bad("damaged")
def tensor_beyond_its_storage(folder):
    """What CVE-2026-24747 was about: a shape that reaches behind the numbers."""
    path = plain(folder)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(folder / "y.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):  # conv.bias: 4 elements become 200
                data = data.replace(b"K\x00K\x04\x85", b"K\x00K\xc8\x85")
            new.writestr(name, data)
    return folder / "y.pt"


@bad("a device, pipe or socket")
def pipe(folder):
    os.mkfifo(folder / "x.pt")
    return folder / "x.pt"


@bad("of torch.distributed.checkpoint")
def distributed_checkpoint(folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": net().state_dict()}, checkpoint_id=folder, no_dist=True)
    return folder


@bad("a tar archive")
def tar_archive(folder):
    """A legacy format that torch.load would unpack; its first name makes it look like a pickle."""
    with tarfile.open(
        folder / "x.pt", "w", format=tarfile.GNU_FORMAT, encoding="latin1"
    ) as archive:
        archive.addfile(tarfile.TarInfo("\x80\x02"))
    return folder / "x.pt"


@bad("nested tuples")
def tuples_that_double(folder):
    # } (dict), 1, forty times: memo 0, get 0, a tuple of both; then None, set the item
    doubled = b"q\x00h\x00\x86" * 40
    return written(folder, b"\x80\x02}K\x01" + doubled + b"Ns.")


@bad("an item set in what is no dict")
def items_set_in_a_tensor_without_end(folder):
    path = saved(folder, {"w": torch.zeros(1, 1).expand(2, 10**15)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(folder / "y.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)  # REDUCE makes the tensor; then get item 0 set
            new.writestr(
                name, data.replace(b"Rq", b"RK\0K\0sq") if b"data.pkl" in name.encode() else data
            )
    return folder / "y.pt"


@bad("no state dict in it, but list of 1", inspectable=True)
def lists_nested_deep(folder):
    return written(folder, b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")


@bad("no state dict in it", inspectable=True)
def integer_of_5000_digits(folder):
    return written(folder, pickle.dumps({"a": 10**5000}))


@bad("no state dict in it, but dict of 0", inspectable=True)
def empty_dict(folder):
    return saved(folder, {})


@bad("damaged")
def list_that_holds_itself_and_ends(folder):
    # ] (list), memo 0, get 0, append, and no STOP
    return written(folder, b"\x80\x02]q\x00h\x00a")


@bad("no state dict in it", inspectable=True)
def list_that_holds_itself(folder):
    return written(folder, b"\x80\x02]q\x00h\x00a.")


@bad("damaged")
def memory_index_of_four_billion(folder):
    return written(folder, b"\x80\x02]r\xff\xff\xff\xff" + b"j\x01\x00\x00\xff.")
