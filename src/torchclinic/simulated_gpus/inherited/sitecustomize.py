"""Python runs this at its start, since its folder is on PYTHONPATH: simulate GPUs with torch."""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SETTINGS = os.environ.get("TORCHCLINIC_SIMULATED_GPUS")


class WithGPUs:
    """Finds torch as everybody does, and simulates GPUs when it has been imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module if spec else None

        def load_and_simulate(module):
            load(module)
            try:
                from torchclinic import UserError
                from torchclinic.simulated_gpus import install
            except ImportError:
                sys.exit(f"No GPUs are simulated: {sys.executable} has no torchclinic.")
            try:
                install(SETTINGS)
            except UserError as error:
                sys.exit(f"No GPUs are simulated: {error}")

        if spec:
            spec.loader.exec_module = load_and_simulate
        return spec


if SETTINGS:
    sys.meta_path.insert(0, WithGPUs)

# The machine's own sitecustomize is hidden by this one.
others = [path for path in sys.path if os.path.abspath(path) != HERE]
if own := importlib.machinery.PathFinder.find_spec("sitecustomize", others):
    own.loader.exec_module(importlib.util.module_from_spec(own))
