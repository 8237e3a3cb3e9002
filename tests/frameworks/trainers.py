"""What Lightning, Fabric, timm, Ultralytics and ema-pytorch save: often two models in one file."""

from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import torch
from cases import Case, X, logits, made_by, net
from torch import nn


def of_net(path, model, key="", prefix="", **more):
    """A case of weights that are in a file under a key, or whose names begin with a prefix."""

    def own():
        state = torch.load(path, weights_only=False)
        state = state[key] if key else state
        ours = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        (fresh := net(7)).load_state_dict(ours)
        return fresh

    return Case(path, partial(net, 7), logits(model, X), own, **more)


def lightning_module(model):
    from lightning import LightningModule

    class Task(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.1)

    return Task()


def fitted(folder, model, **more):
    from lightning import Trainer

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), 4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=4, accelerator="cpu", default_root_dir=folder, **quiet, **more)
    trainer.fit(lightning_module(model), data)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


@made_by("lightning/checkpoint")
def lightning_checkpoint(folder):
    model = net()
    return of_net(fitted(folder, model), model, "state_dict", "net.")


@made_by("lightning/weight_averaging")
def averaged_checkpoint(folder):
    """Of its callback: state_dict is the average, current_model_state what is trained."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    path = fitted(folder, net(), callbacks=[EMAWeightAveraging(decay=0.5)])
    case = of_net(path, net(), "state_dict", "net.", names="current_model_state")
    case.want = logits(case.own(), X)
    return case


@made_by("lightning/fabric")
def fabric_checkpoint(folder):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net(), torch.optim.AdamW(net().parameters()))
    fabric.save(folder / "state.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    return of_net(folder / "state.ckpt", model, "model")


@made_by("lightning/fabric_several")
def fabric_of_several_models(folder):
    """A GAN and the average of its generator, each under a key of its own."""
    from lightning.fabric import Fabric

    fabric, average = Fabric(accelerator="cpu", devices=1), net(3)
    made, judge = fabric.setup(net(1)), fabric.setup(net(2))
    fabric.save(folder / "gan.ckpt", {"gen": made, "disc": judge, "gen_avg": average, "step": 3})
    choice = {"options": {"key": "gen_avg"}, "names": "'gen_avg'"}
    return of_net(folder / "gan.ckpt", average, "gen_avg", **choice)


@made_by("lightning/fabric_inside")
def fabric_inside(folder):
    """Saved by hand, from a module that holds what Fabric set up."""
    from lightning.fabric import Fabric

    inner = net()
    torch.save(
        nn.Module.state_dict(Fabric(accelerator="cpu", devices=1).setup(inner)),
        folder / "model.pt",
    )
    one = {"key": "_forward_module"}  # _original_module has the same tensors
    return of_net(folder / "model.pt", inner, "", "_forward_module.", options=one)


def vit(seed=1):
    import timm

    torch.manual_seed(seed)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, **size)


IMAGE = torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)


@made_by("timm/trained", ema=False)
@made_by("timm/ema", ema=True)
def timm_checkpoint(folder, ema):
    from timm.models import load_checkpoint
    from timm.utils import CheckpointSaver, ModelEmaV3

    model = vit()
    average, optimizer = ModelEmaV3(model), torch.optim.SGD(model.parameters(), 0.5)
    model(IMAGE).sum().backward()
    optimizer.step()
    saver = CheckpointSaver(
        model, optimizer, Namespace(model="vit"), average, checkpoint_dir=str(folder)
    )
    saver.save_checkpoint(0, 0.5)

    def own():
        fresh = vit(7)
        load_checkpoint(fresh, str(folder / "last.pth.tar"), use_ema=ema)
        return fresh

    want = logits(average.module if ema else model, IMAGE)
    options = {"key": "state_dict_ema"} if ema else {}
    path = folder / "last.pth.tar"
    return Case(path, partial(vit, 7), want, own, IMAGE, options, names="state_dict_ema")


def yolo(seed=1):
    from ultralytics.nn.tasks import ClassificationModel

    torch.manual_seed(seed)
    shape = {"nc": 2, "scales": {"n": [0.33, 0.02, 64]}, "scale": "n", "ch": 3}
    layers = {
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "C2f", [8, True]]],
        "head": [[-1, 1, "Classify", ["nc"]]],
    }
    return ClassificationModel(shape | layers, nc=2, verbose=False).eval()


def ultralytics_checkpoint(folder, save):
    from ultralytics.nn.tasks import load_checkpoint

    model, path = yolo(), folder / "last.pt"
    save(model, path)
    case = Case(path, partial(yolo, 7), None, lambda: load_checkpoint(path)[0].float(), IMAGE)
    case.want = logits(case.own(), IMAGE)
    return case


@made_by("ultralytics/saved")
def ultralytics_saved(folder):
    from ultralytics import YOLO

    def save(model, path):
        whole = YOLO("yolov8n-cls.yaml", verbose=False)
        whole.model, whole.ckpt = model, {}
        whole.save(path)

    return ultralytics_checkpoint(folder, save)


@made_by("ultralytics/last")
def ultralytics_last(folder):
    """The trainer's file: its model is None, the average is the model."""
    from ultralytics.engine.trainer import BaseTrainer
    from ultralytics.utils import DEFAULT_CFG
    from ultralytics.utils.torch_utils import ModelEMA

    def save(model, path):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(IMAGE)[0].sum().backward()
        optimizer.step()
        BaseTrainer.save_model(SimpleNamespace(
            ema=ModelEMA(model), model=model, optimizer=optimizer, epoch=3, best_fitness=0.5,
            fitness=0.5, metrics={}, args=DEFAULT_CFG, read_results_csv=dict, wdir=folder,
            scaler=torch.amp.GradScaler("cpu"), last=path, best=path, save_period=-1,
            stopper=SimpleNamespace(best_fitness=0.5, best_epoch=3),
        ))  # fmt: skip

    return ultralytics_checkpoint(folder, save)


@made_by("ema-pytorch/state_dict")
def ema_pytorch(folder):
    from ema_pytorch import EMA

    model = net()
    ema = EMA(model, beta=0.5, update_after_step=0, update_every=1)
    for _ in range(4):
        nn.init.normal_(model.head.weight)
        ema.update()
    torch.save(ema.state_dict(), folder / "ema.pt")
    choice = {"options": {"key": "ema_model"}, "names": "ema_model."}
    return of_net(folder / "ema.pt", ema.ema_model, "", "ema_model.", **choice)


@made_by("torch/averaged")
def averaged_beside(folder):
    """As torchvision's train.py keeps an AveragedModel beside the model."""
    from torch.optim.swa_utils import AveragedModel

    model = net(1)
    average = AveragedModel(model, use_buffers=True)
    for _ in range(2):
        average.update_parameters(model)
        nn.init.normal_(model.head.weight)
    assert not torch.equal(model.head.weight, average.module.head.weight)
    state = {"model": model.state_dict(), "model_ema": average.state_dict(), "epoch": 3}
    torch.save(state, folder / "both.pt")
    choice = {"options": {"key": "model_ema"}, "names": "model_ema"}
    return of_net(folder / "both.pt", average.module, "model_ema", "module.", **choice)


@made_by("torch/teacher")
def teacher(folder):
    """Two models of one shape in one flat file, as self-distillation saves them."""
    student, whole = net(1), nn.ModuleDict({"student": net(1), "teacher": net(2)})
    torch.save(whole.state_dict(), folder / "both.pt")
    choice = {"options": {"key": "teacher"}, "names": "teacher."}
    assert not torch.equal(logits(student, X), logits(whole["teacher"], X))
    return of_net(folder / "both.pt", whole["teacher"], "", "teacher.", **choice)
