"""``python -m torchclinic`` is the command ``torchclinic``."""

from torchclinic.cli import main

if __name__ == "__main__":
    main()
