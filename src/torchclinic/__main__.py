"""``python -m torchclinic`` is the command ``torchclinic``."""

import os
import sys

# Python would import from the current folder first, and a stranger's may hold a torch.py.
if sys.path[:1] == [os.getcwd()] and not sys.flags.safe_path:
    del sys.path[0]

from torchclinic.cli import main

if __name__ == "__main__":
    main()
