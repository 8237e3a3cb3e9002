"""The files in ``rungs/cluster/``, as far as a machine without a cluster can check them."""

import copy
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from running import ROOT, ran, shellcheck

from torchladder import data, models
from torchladder.launching import launch

SBATCH = ROOT / "rungs/cluster" / "torchrun.sbatch"
WITHOUT_GPUS = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

# --- Slurm ----------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing_in_the_sbatch_script():
    shellcheck(SBATCH)


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
if [ "$TIME_IS_OVER" ]; then  # as Slurm by --signal
    until [ -e "$OUT/log.jsonl" ]; do sleep 0.1; done
    kill -TERM $first $second
fi
wait $first; wait $second
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
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port() - 29400),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "OUT": str(tmp_path / "gpt"),
    }


def free_port():
    """One that the script will choose: 29400 + the last three digits of the job's number."""
    for port in range(29400 + os.getpid() % 900, 30400):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")


@pytest.mark.long
def test_the_sbatch_script_saves_when_its_time_is_over_and_goes_on_when_it_is_requeued(slurm):
    out = Path(slurm["OUT"])
    np.save(out.parent / "tokens.npy", np.arange(4000, dtype=np.uint8) % 7)
    tiny = "--context 16 --layers 1 --width 16 --batch 4 --steps 600 --log-every 20 --peak 1"
    script = ["bash", SBATCH, "--data", out.parent / "tokens.npy", *tiny.split()]
    over, again = slurm | {"TIME_IS_OVER": "1"}, slurm | {"SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(script, env=over, timeout=900, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(
        f"job {slurm['SLURM_JOB_ID']}, start 1, nodes localhost localhost"
    )
    (saved,) = {int(step) for step in re.findall(r"saved after step (\d+)", done.stderr)}
    assert saved < 600
    output = ran(*script, env=again, timeout=900, cwd=ROOT)
    assert "start 2" in output
    assert f"from step {saved}\n" in output


# --- Kubernetes -----------------------------------------------------------------------------------


@pytest.fixture
def train_job():
    return yaml.safe_load((ROOT / "rungs/cluster" / "trainjob.yaml").read_text())


def test_kubeflow_trainer_knows_every_field_of_the_train_job(train_job):
    """By the classes that Kubeflow makes from its own OpenAPI schema."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    read = models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(train_job))
    assert read.to_dict() == train_job


def test_the_train_job_starts_a_program_of_the_book_with_options_that_it_has(train_job):
    trainer = train_job["spec"]["trainer"]
    program, *options = trainer["args"]
    program = ROOT / Path(program).relative_to("/book")
    known = re.findall(r'add\("(--[\w-]+)"', program.read_text())
    assert {option.partition("=")[0] for option in options} <= set(known)
    patch = train_job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (folder,) = (mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"])
    assert f"--out={folder}/gpt" in options


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
    program = ["python", ROOT / "rungs/cluster" / "ray_train.py", "--epochs", "2"]
    storage = ["--storage", tmp_path / "storage"]
    # Not in tmp_path: the names of Ray's sockets would be too long there.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        env = WITHOUT_GPUS | {"PYTHONPATH": str(ROOT / "src"), "RAY_TMPDIR": short}
        output = ran(*program, *storage, env=env, timeout=900, cwd=tmp_path)
    by_ray = float(re.search(r"^2 workers, test accuracy ([\d.]+)%$", output, re.MULTILINE)[1])
    rung_4 = 100 * launch(train_as_rung_4, 2, timeout=600)[0]
    assert abs(by_ray - rung_4) < 2
