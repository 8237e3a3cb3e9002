"""Make the bundled subset from the full Fashion-MNIST (Debian's ``dataset-fashion-mnist``).

    python src/torchladder/bundled/make_subset.py

It writes ``fashion_mnist_small.npz`` beside itself: the first 1,200
training and 200 test images of each class.
"""

import numpy as np

from torchladder.data import _FASHION_FILES, BUNDLED, balanced_subset, load_dataset

if __name__ == "__main__":
    subset = balanced_subset(load_dataset("fashion_mnist"), train=1200, test=200)
    tensors = {key: getattr(subset, key) for key in _FASHION_FILES}
    arrays = {key: tensor.squeeze().numpy().astype(np.uint8) for key, tensor in tensors.items()}
    np.savez_compressed(BUNDLED, **arrays)
