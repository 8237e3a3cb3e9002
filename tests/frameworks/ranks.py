"""What DeepSpeed, torchtitan and torch itself save from two ranks."""

import multiprocessing
import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from cases import Case, X, logits, made_by, net
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchclinic.checkpoint_files import load_into


def on_ranks(saves, folder):
    """Call a function on two ranks; what it returns on the first, whole weights, comes back."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as meet:
        # Forked, the ranks need not import these again; not from here, where autograd may have run.
        multiprocessing.set_forkserver_preload(["deepspeed", "torchtitan.components.checkpoint"])
        mp.start_processes(one_rank, (saves, folder, meet), 2, start_method="forkserver")
        return torch.load(f"{meet}/whole.pt")


def one_rank(rank, saves, folder, meet):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meet}/store", rank=rank, world_size=2)
    whole = saves(folder)
    if rank == 0:
        torch.save(whole, f"{meet}/whole.pt")
    dist.barrier()
    dist.destroy_process_group()


def loaded(state):
    fresh = net(7)
    fresh.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return fresh


def case(path, whole, own, **more):
    return Case(path, partial(net, 7), logits(loaded(whole), X), lambda: loaded(own()), **more)


# --- DeepSpeed ---------------------------------------------------------------------------------


def save_by_deepspeed(stage, folder):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    deepspeed.init_distributed("gloo", verbose=False)
    settings = {
        "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(X).square().mean())
    engine.step()
    engine.save_checkpoint(str(folder))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return {k: v.clone() for k, v in model.state_dict().items()}


def by_zero_to_fp32(folder):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(str(folder), f"{folder}.whole", tag="global_step1")
    return torch.load(f"{folder}.whole/pytorch_model.bin")


OPTIMIZER_FILE = "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt"


# Stages 1 and 2 divide the optimizer; the weights are whole.
@made_by("deepspeed/zero1_model_file", stage=1, part="global_step1/mp_rank_00_model_states.pt")
@made_by("deepspeed/zero2_folder", stage=2)
@made_by("deepspeed/zero2_optimizer_file", stage=2, part=OPTIMIZER_FILE)
@made_by("deepspeed/zero3_folder", stage=3)
@made_by("deepspeed/zero3_step_folder", stage=3, part="global_step1")
@made_by("deepspeed/zero3_model_file", stage=3, part=OPTIMIZER_FILE.replace("optim", "model"))
def zero(folder, stage, part=""):
    state = on_ranks(partial(save_by_deepspeed, stage), folder)
    words = {"way": "zero_to_fp32", "names": "ZeRO"} if stage > 1 else {}
    return case(folder / part, state, lambda: by_zero_to_fp32(folder), **words)


# --- torch ---------------------------------------------------------------------------------------


def fsdp1(model=None):
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model or net(), device_id=cpu)


def as_kind(model, kind):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    return FullyShardedDataParallel.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"])


def save_fsdp1(kind, folder):
    model = fsdp1()
    with as_kind(model, kind):
        torch.save(model.state_dict(), folder / f"rank{dist.get_rank()}.pt")
    with as_kind(model, "FULL"):
        return model.state_dict()


def read_fsdp1(kind, folder):
    model = fsdp1(net(7))
    with as_kind(model, kind):
        model.load_state_dict(rank_file(folder))
    with as_kind(model, "FULL"):
        return model.state_dict()


def rank_file(folder):
    return torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=False)


def whole(state):
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net(), mesh=dist.init_device_mesh("cpu", (2,)))


def save_fsdp2(folder):
    model = fsdp2()
    torch.save(model.state_dict(), folder / f"rank{dist.get_rank()}.pt")
    return whole(model.state_dict())


def stepped(model, optimizer):
    model(X).sum().backward()
    optimizer.step()


def save_training(folder):
    """Weights, optimizer and the state of a data loader on each rank."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = fsdp2()
    stepped(model, optimizer := torch.optim.AdamW(model.parameters()))
    loader = StatefulDataLoader(list(range(8)), 2)
    next(iter(loader))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    dcp.save(state | {f"loader_{dist.get_rank()}": loader.state_dict()}, checkpoint_id=folder)
    return whole(model.state_dict())


def save_compiled(folder):
    """With wrappers inside the keys of the folder."""
    model = fsdp2()
    wrapped = torch.nn.ModuleDict({"module": torch.compile(model)})
    dcp.save({"model": wrapped.state_dict()}, checkpoint_id=folder)
    return whole(model.state_dict())


def from_dcp(folder):
    """From the one file that torch's own converter makes of the folder."""
    dcp_to_torch_save(folder, f"{folder}.whole.pt")
    load_into(fresh := net(7), f"{folder}.whole.pt")
    return fresh.state_dict()


CONVERT = {"way": "dcp_to_torch", "names": "torch.distributed.checkpoint"}


@made_by("torch/dcp_training", save=save_training)
@made_by("torch/dcp_compiled", save=save_compiled)
def dcp_folder(folder, save):
    path = folder / "saved"
    return case(path, on_ranks(save, path), lambda: from_dcp(path), **CONVERT)


@made_by(
    "torch/fsdp1_sharded", save=partial(save_fsdp1, "SHARDED"), read=partial(read_fsdp1, "SHARDED")
)
@made_by("torch/fsdp1_local", save=partial(save_fsdp1, "LOCAL"), read=partial(read_fsdp1, "LOCAL"))
def fsdp1_file(folder, save, read):
    """One of several files, which as many ranks can read again."""
    state = on_ranks(save, folder)
    words = {"way": "rank", "names": "rank"}
    return case(folder / "rank0.pt", state, lambda: on_ranks(read, folder), **words)


@made_by("torch/fsdp2_rank_file")
def fsdp2_file(folder):
    """Whose shards one process joins."""
    state = on_ranks(save_fsdp2, folder)

    def own():
        files = [torch.load(folder / f"rank{i}.pt", weights_only=False) for i in range(2)]
        shards = {k: v for k, v in files[0].items() if hasattr(v, "to_local")}
        return files[0] | {k: torch.cat([file[k].to_local() for file in files]) for k in shards}

    return case(folder / "rank0.pt", state, own, way="to_local", names="DTensor")


# --- torchtitan ----------------------------------------------------------------------------------


class TitanLoader:
    def state_dict(self):
        return {f"dp_rank_{dist.get_rank()}": b"loader"}


def save_by_titan(folder):
    """Its model's keys are at the top of the folder, beside the optimizer's and the loader's."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import Checkpoint, LRScheduler

    model = fsdp2()
    stepped(model, optimizers := OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.1}))
    schedules = build_lr_schedulers(optimizers, LRScheduler(warmup_steps=1), 4)
    config = Checkpoint(enable=True, folder=str(folder), interval=1)
    CheckpointManager(TitanLoader(), [model], optimizers, schedules, {}, config, None).save(1)
    return whole(model.state_dict())


@made_by("torchtitan/step_folder")
def titan_folder(folder):
    state, path = on_ranks(save_by_titan, folder), folder / "step-1"
    return case(path, state, lambda: from_dcp(path), **CONVERT)
