"""The programs that readers copy run where they copy them to: on two T4s, here simulated.

First those of the chapters, with a reader's own model in them, then the one for several sessions.
"""

import json
import os
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from PIL import Image
from running import ROOT
from test_code_of_pages import TORCHRUN, YOURS, blocks, within
from test_rungs import ONLY_RANK, run_here
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

MODEL = "nn.Sequential(nn.Linear(20, 64), "


def program(notebook, name):
    """A cell's program with `Yours` as its model."""
    cells = json.loads((ROOT / f"notebooks/{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    [cell] = [c["source"] for c in cells if c["source"][0] == f"%%writefile {name}\n"]
    text = "".join(cell[1:])
    assert text.count(MODEL) == 1
    return f"{YOURS}\n{text.replace(MODEL, 'Yours(nn.Linear(20, 64), ')}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("notebook", "name", "file", "classes", "rate"),
    [
        ("09_rung_4_distributed", "train_ddp.py", "model.pt", 2, "lr=0.1"),
        ("12_rung_5_fsdp", "train_fsdp.py", "model.pt", 3, "lr=0.01"),
        ("19_many_machines", "train_hosts.py", "checkpoint.pt", 2, "lr=0.1"),
        ("both_gpus", "train.py", "model.pt", 2, "lr=1e-3"),
    ],
)
def test_a_chapters_first_program_trains_a_model_of_yours_and_saves_it_while_it_is_finite(
    notebook, name, file, classes, rate, tmp_path, monkeypatch
):
    text = program(notebook, name)
    (tmp_path / name).write_text(text)
    within(550, *TORCHRUN, name, cwd=tmp_path)
    saved = torch.load(tmp_path / file, map_location="cpu")
    exec(YOURS, names := {})
    middle = [torch.nn.Dropout(0.1)] if name == "train_hosts.py" else []
    layers = [torch.nn.ReLU(), *middle, torch.nn.Linear(64, classes)]
    model = names["Yours"](torch.nn.Linear(20, 64), *layers)
    assert model.load_state_dict(saved.get("model", saved))
    assert model[1][1].num_batches_tracked > 3
    if name == "train.py":  # its page goes on with adapters for that model
        (tmp_path / "lora.py").write_text(program(notebook, "lora.py"))
        assert "step 300: loss" in within(550, *TORCHRUN, "lora.py", cwd=tmp_path)
    (tmp_path / file).unlink()
    assert text.count(rate) == 1
    (tmp_path / name).write_text("import math\n" + text.replace(rate, "lr=math.inf"))
    monkeypatch.chdir(tmp_path)
    alone = mock.patch.dict(os.environ, ONLY_RANK | {"GROUP_RANK": "0"})
    with alone, pytest.raises(AssertionError, match="weights not finite"):
        run_here(tmp_path / name)
    assert not (tmp_path / file).exists()


def test_a_nan_ends_chapter_05s_program_before_it_saves(tmp_path):
    chapter = json.loads((ROOT / "notebooks/05_rung_1_cpu.ipynb").read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in chapter["cells"]]
    [text] = [source for source in sources if "folder = tempfile" in source]
    text = text.replace("tempfile.mkdtemp()", repr(str(tmp_path)))
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        exec(text.replace("\nmodel = ", "\ninputs[6, 0] = math.nan\nmodel = ", 1), {})
    assert not list(tmp_path.iterdir())


# --- in several sessions ------------------------------------------------------------------------

PAGE = "book/several_sessions.md"
IMAGES = "input/datasets/ann/flowers/train"
(RECIPE, _), (FROM_IMAGENET, _), (COPYING, _) = blocks(PAGE, "python")
SMALL_NET = "models.ResNet(models.resnet.BasicBlock, [1] * 4"
KILLED = """\
        if (rank, epoch) == (1, 2):
            os.kill(os.getpid(), 9)
        schedule.step()
"""


SMALLER = {
    "(224)": "(32)", "(256)": "(40)", "BATCH = 128": "BATCH = 16", "workers=2": "workers=1",
    "EPOCHS, HOURS = 60": "EPOCHS, HOURS = 2", "models.resnet18(": f"{SMALL_NET}, ",
}  # fmt: skip


def session(name, tmp_path, text, **made):
    """What one prints, and its checkpoint; its inputs are ``kaggle/input``, its files its own."""
    folder = tmp_path / name
    (folder / "working").mkdir(parents=True)
    text = text.replace("/kaggle/input", f"{tmp_path}/input").replace("/kaggle", str(folder))
    for large, small in SMALLER.items():
        assert large in text
        text = text.replace(large, small)
    (folder / "train.py").write_text(text)
    said = within(500, *TORCHRUN, "train.py", cwd=folder, **made)
    return said, folder / "working/flowers-1.pt"


def flowers(folder):
    for i in range(42):  # each of two ranks then validates with one of each kind
        kind = ("rose", "tulip")[i % 2]
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (6 * i, 0, 100 * (i % 2))).save(folder / kind / f"{i:02}.png")


def right_of_those_held_back(folder, net):
    """In percent; counted by one process."""
    as_imagenet = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    change = [transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor(), as_imagenet]
    data = ImageFolder(folder, transforms.Compose(change))
    torch.manual_seed(0)
    chosen = [data[i] for i in torch.randperm(len(data)).tolist()[: len(data) // 10]]
    right = sum(net(pixels[None]).argmax().item() == label for pixels, label in chosen)
    return 100 * right / len(chosen)


def test_programs_start_alike():
    """The process is bound to its GPU, so no barrier guesses one and NCCL connects at once."""
    lines = (
        (ROOT / "rungs/4_ddp.py").read_text().partition("device.type in")[2].split("rank, ranks")[0]
    )
    start = [line.partition("  #")[0].strip() for line in lines.splitlines()[1:]]
    assert start[-2:] == ["dist.init_process_group(device_id=device)", ""]
    names = [("09_rung_4_distributed", "train_ddp.py"), ("12_rung_5_fsdp", "train_fsdp.py")]
    names += [("both_gpus", "train.py"), ("both_gpus", "lora.py")]
    for text in [RECIPE, *(program(*name) for name in names)]:
        assert "\n".join(start) in re.sub(r"^ +|  #.*", "", text, flags=re.M)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # three sessions
def test_a_second_session_goes_on_where_a_killed_one_stopped_with_its_own_file(tmp_path):
    flowers(tmp_path / IMAGES)
    said, whole = session("whole", tmp_path, RECIPE)
    assert said.splitlines()[0] == "flowers-1: begins with epoch 1 of 2"
    net = eval(f"{SMALL_NET}, num_classes=2)")
    net.load_state_dict(torch.load(whole, map_location="cpu")["net"])
    percent = right_of_those_held_back(tmp_path / IMAGES, net.eval())
    assert said.splitlines()[-1].endswith(f"validation {percent:.1f}%")

    text = RECIPE.replace("        schedule.step()\n", KILLED)
    _, killed = session("killed", tmp_path, text, fails=True)
    output = tmp_path / "input/notebooks/ann/mine"
    output.mkdir(parents=True)
    shutil.copy(killed, output)
    assert torch.load(killed, map_location="cpu")["epoch"] == 1
    torch.save({"epoch": 50}, output / "flowers-2.pt")  # of another run
    torch.save({"epoch": 0}, (tmp_path / IMAGES).with_name("flowers-1.pt"))  # of an older version
    before = sorted((tmp_path / "input").rglob("*"))

    said, second = session("second", tmp_path, RECIPE)
    assert said.splitlines()[0] == "flowers-1: begins with epoch 2 of 2"
    ended, one = (torch.load(file, map_location="cpu") for file in (second, whole))
    assert ended.pop("data") == one.pop("data") == (["rose", "tulip"], 42)
    torch.testing.assert_close(ended, one, rtol=0, atol=0)
    assert ended["scaler"]["scale"] > 1  # fp16, as on a T4
    assert sorted((tmp_path / "input").rglob("*")) == before


def test_a_run_can_begin_with_imagenets_weights(tmp_path, monkeypatch):
    assert "    net = models.resnet18(num_classes=" in RECIPE  # which these lines replace
    file = tmp_path / "hub/checkpoints" / models.ResNet18_Weights.IMAGENET1K_V1.url.split("/")[-1]
    file.parent.mkdir(parents=True)
    torch.save(weights := models.resnet18().state_dict(), file)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    names = {"models": models, "torch": torch, "data": SimpleNamespace(classes=["rose", "tulip"])}
    exec(FROM_IMAGENET, names)
    net = names["net"].eval()
    assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    assert net.conv1.weight.equal(weights["conv1.weight"])


def test_the_files_of_the_books_own_run_are_copied_where_it_goes_on(tmp_path):
    before = tmp_path / "input/notebooks/ann/my-notebook/run"
    before.mkdir(parents=True)
    for step in (9, 10):
        (before / f"step_{step:08}.pt").write_text("a checkpoint")
    text = COPYING.replace("/kaggle", str(tmp_path))
    (tmp_path / "working").mkdir()
    exec(text, {})
    exec(text, {})
    assert [p.name for p in (tmp_path / "working/run").iterdir()] == ["step_00000010.pt"]
