"""``python -m torchladder`` is the command ``torchladder``."""

from torchladder.cli import main

if __name__ == "__main__":
    main()
