"""What ``tools/pack_offline.py`` packs is enough to run notebooks without a network."""

from importlib.metadata import distribution

import pack_offline
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# ipykernel asks for it, and starts without it.
LEFT_OUT = {"debugpy"}
OPTIONAL = {"nest-asyncio"}  # of older versions


@pytest.mark.parametrize("name", sorted(set(pack_offline.WHEELS) - OPTIONAL))
def test_what_a_packed_package_needs_is_packed_too(name):
    wanted = (Requirement(line) for line in distribution(name).requires or [])
    needed = {
        canonicalize_name(want.name)
        for want in wanted
        if want.marker is None or want.marker.evaluate({"extra": "", "sys_platform": "linux"})
    }
    # numpy comes with PyTorch's environment.
    assert needed - {"numpy"} <= pack_offline.WHEELS.keys() | LEFT_OUT


def test_the_folder_has_the_images_and_names_the_commit(tmp_path, monkeypatch):
    images = tmp_path / "images"
    images.mkdir()
    for name in pack_offline.data.FASHION_SHA256:
        (images / f"{name}.gz").write_bytes(b"packed")
    monkeypatch.setenv("TORCHLADDER_DATA", str(images))
    monkeypatch.setattr(pack_offline, "ROOT", tmp_path)
    monkeypatch.setattr(pack_offline, "commit", lambda: {"commit": "abc", "clean": True})
    asked = []
    monkeypatch.setattr(pack_offline, "download", lambda *arguments: asked.append(arguments))
    folder = tmp_path / "offline"
    (folder / "of an earlier version").mkdir(parents=True)
    files = pack_offline.pack(folder, "3.12", "x86_64")
    images = {f"{name}.gz" for name in pack_offline.data.FASHION_SHA256}
    assert {file.name for file in files} == images | {"commit.json"}
    assert (folder / "commit.json").read_text() == '{\n "commit": "abc",\n "clean": true\n}\n'
    assert asked == [(folder / "wheels", "3.12", "x86_64")]
    assert not (folder / "of an earlier version").exists()


def test_images_that_are_missing_are_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_offline.data, "_folders", lambda folder: [tmp_path])
    with pytest.raises(FileNotFoundError, match=r"lacks train-images.*TORCHLADDER_DATA"):
        pack_offline.data_files()
