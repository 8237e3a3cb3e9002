"""Make a chapter run on Kaggle and Colab: one notebook that carries the packages, for both.

    python -m tools.hosted_notebooks [folder]       # dist/kaggle; `make kaggle` calls this

writes each notebook of the book so that it runs on its own; the site offers the same notebooks.
The same sources give the same bytes.
"""

import base64
import bz2
import html
import io
import os
import re
import sys
import tarfile
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
METADATA = {  # in addition to the chapter's own
    # What Colab itself writes for its T4, and asks for when it opens such a notebook.
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    # What Kaggle itself writes for two T4s: https://github.com/Kaggle/kaggle-cli/issues/821
    "kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": True},
}


def write_notebooks(folder: Path) -> list[Path]:
    """Every notebook of the book, as it runs on its own, in `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in NOTEBOOKS:
        text = nbformat.writes(hosted_notebook(path), ensure_ascii=False) + "\n"
        (folder / path.name).write_text(text, encoding="utf-8")
    return [folder / path.name for path in NOTEBOOKS]


def hosted_notebook(path: Path) -> nbformat.NotebookNode:
    """The chapter at `path` without outputs, as a notebook that needs nothing of the repository."""
    chapter: Any = nbformat.read(path, as_version=4)
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            cell.source = plain_markdown(cell.source, path)
        else:
            cell.outputs, cell.execution_count = [], None
    text = "\n".join(cell.source for cell in chapter.cells)
    needs = {
        "needs_data": bool(re.search(r"data\.load_dataset\(|fashion_mnist_small", text)),
        "two_gpus": bool(re.search(r"\blaunch\(|DataParallel\(", text)),
        "rungs": "rungs/" in text,
    }
    carried = carried_source(with_gpt="clothes_gpt" in text)
    first = nbformat.v4.new_code_cell(first_cell(carried, **needs), id="torchladder")
    chapter.cells.insert(0, first)
    chapter.metadata.pop("run", None)
    chapter.metadata |= METADATA
    return chapter


# --- what the notebook carries ------------------------------------------------------------------


@cache
def carried_source(with_gpt: bool = False) -> str:
    """The packages without images, the check of the session, and the files that chapters read."""
    left_out = {"bundled", "__pycache__"}
    src = ROOT / "src"
    files = {"LICENSE": ROOT / "LICENSE", "hosted_session.py": ROOT / "tools/hosted_session.py"}
    for package in ("torchclinic", "torchexercises", "torchladder"):
        paths = sorted(path for path in (src / package).rglob("*") if path.is_file())
        files |= {p.relative_to(src).as_posix(): p for p in paths if not left_out & set(p.parts)}
    if with_gpt:
        path = src / "torchladder/bundled/clothes_gpt.safetensors"
        files[path.relative_to(src).as_posix()] = path
    for pattern in ("rungs/*.py", "rungs/cluster/*.*", "book/runs/two_hosts.json"):
        files |= {p.relative_to(ROOT).as_posix(): p for p in sorted(ROOT.glob(pattern))}
    return carry(files)


def carry(files: dict[str, Path]) -> str:
    """Files, by the names that they get where they are unpacked, as one line of text."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, path in files.items():
            member, content = tarfile.TarInfo(name), path.read_bytes()
            member.size = len(content)  # times, owners and modes stay alike everywhere
            archive.addfile(member, io.BytesIO(content))
    return base64.b85encode(bz2.compress(packed.getvalue())).decode()


def first_cell(carried: str, **session: bool) -> str:
    """The code that unpacks what is carried and calls `hosted_session.check_session(**session)`."""
    template = (ROOT / "tools" / "hosted_first_cell.py").read_text(encoding="utf-8")
    _, *code, _ = template.splitlines()  # without what is for ruff, and without the empty call
    wanted = "".join(f"{name}=True, " for name, value in session.items() if value)
    return "\n".join([*code, f'set_up({wanted}carried="{carried}")'])


# --- what their Markdown does not know ----------------------------------------------------------


def plain_markdown(text: str, path: Path) -> str:
    """MyST as plain Markdown; `path` is the notebook's, for relative names."""
    unknown = re.search(r"^(?::{3,}|```)\{[\w-]+\}.*", text, re.MULTILINE)
    if unknown:
        raise ValueError(f"{path.name}: {unknown[0]!r} is for the site alone; use plain Markdown")
    # The bundled images do not travel; the first cell writes the same from the full set.
    text = text.replace("src/torchladder/bundled/", "rungs/")
    text = re.sub(
        r"!\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([\w./-]+\.svg)\)",
        lambda found: embedded(found[1], path.parent / found[2]),
        text,
    )
    return re.sub(
        r"\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([\w./-]+\.(?:ipynb|md|py)(?:#[\w-]+)?|#[\w-]+)\)",
        lambda found: linked(found[1], found[2], path),
        text,
    )


def embedded(alt: str, picture: Path) -> str:
    """A picture that travels in its cell.

    As the data of an ``<img>``: JupyterLab shows no SVG that is a cell's attachment
    (https://github.com/jupyterlab/jupyterlab/issues/10464), and markdown-it, on which other
    front ends build, refuses such data in Markdown's own form.
    """
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def linked(text: str, target: str, path: Path) -> str:
    """A link into the book as a link to its public site, if it has one, else only its words."""
    site = public_site()
    if not site or target.endswith(".py"):  # a program lies beside the notebook there
        return text
    page, _, anchor = target.partition("#")
    page = os.path.relpath(path.parent / page if page else path, ROOT)
    page = Path(page).with_suffix(".html").as_posix()
    return f"[{text}]({site}/{page}{'#' + anchor if anchor else ''})"


@cache
def public_site() -> str:
    """Where the site is published: ``Documentation`` in ``pyproject.toml``, if it is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Documentation", "").rstrip("/")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "kaggle"
    print(f"{len(write_notebooks(folder))} notebooks are in {folder}")


if __name__ == "__main__":
    main()
