"""`launch` in a live kernel: functions of a cell, and errors that name the cell."""

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def run_cells(*sources):
    """The cells' outputs from a live kernel, as text."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]


def test_functions_of_a_cell_run_after_a_large_product_in_the_kernel():
    outputs = run_cells(
        "import torch, torch.distributed as dist\n"
        "from torchladder.launching import launch\n"
        "_ = torch.randn(1500, 1500) @ torch.randn(1500, 1500)",
        "def helper():\n    return dist.get_rank()\n\n"
        "def work():\n    print('hello from', helper())\n    return helper() * 10",
        "print(launch(work, show='all'))",
        "print(launch(work, show='none'))",
    )
    assert outputs[2] == "hello from 0\n[rank 1] hello from 1\n[0, 10]\n"
    assert outputs[3] == "[0, 10]\n"


def test_an_error_names_the_cell_and_shows_its_line():
    with pytest.raises(CellExecutionError) as caught:
        run_cells(
            "import torch.distributed as dist\nfrom torchladder.launching import launch",
            "def work():\n    return 1 / dist.get_rank()",
            "launch(work)",
        )
    assert caught.value.ename == "LaunchError"
    assert (
        'File "Cell In[2]", line 2, in work\n    return 1 / dist.get_rank()' in caught.value.evalue
    )
