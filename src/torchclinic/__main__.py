"""``python -m torchclinic`` is the command ``torchladder``."""

from torchclinic.cli import main

if __name__ == "__main__":
    main()
