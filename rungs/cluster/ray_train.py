"""The book's training loop as a Ray Train job: python rungs/cluster/ray_train.py --workers 2

On one machine this starts Ray itself. On a Ray cluster, with a folder that all nodes see:
ray job submit --working-dir . -- \\
    python rungs/cluster/ray_train.py --address auto --gpus --storage DIR
Needs pip install "torchladder[book]" "ray[train]>=2.60", on every node.
"""

import argparse
import os
import tempfile

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports its use to its makers

from torchladder import data, models, training


def train_lenet(options):
    """What every worker runs; Ray has made the process group, as torchrun and a script do."""
    images = data.load_dataset()
    if options["few"]:
        images = data.balanced_subset(images, train=2000, test=1000)
    history = training.train(
        models.LeNet(),
        images,
        rung="ddp",
        epochs=options["epochs"],
        batch_size=64 // options["workers"],  # 64 images a step in all, or a few fewer
        checkpoint_dir=options["checkpoints"],
    )
    return history[-1].test_accuracy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--few", action="store_true", help="2,000 images, to try it out")
    parser.add_argument("--address", help='"auto" on a Ray cluster')
    parser.add_argument("--storage", default=None, help="a folder that all nodes see")
    args = parser.parse_args()

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    here = {} if args.address else {"num_cpus": args.workers, "include_dashboard": False}
    ray.init(address=args.address or "local", **here)
    storage = args.storage or tempfile.mkdtemp(prefix="device-ladder-")
    options = {"workers": args.workers, "epochs": args.epochs, "few": args.few}
    options["checkpoints"] = os.path.join(storage, "checkpoints")
    trainer = TorchTrainer(
        train_lenet,
        train_loop_config=options,
        torch_config=TorchConfig(backend="nccl" if args.gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        # A worker that is lost: all start again, and `train` goes on from its checkpoint.
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(f"{args.workers} workers, test accuracy {result.return_value:.2%}")  # of rank 0
    ray.shutdown()


if __name__ == "__main__":
    main()
