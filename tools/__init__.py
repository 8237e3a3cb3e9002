"""What maintainers run, as `python -m tools.refresh`, in the root."""
