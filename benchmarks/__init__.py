"""Measured ratios against peers and limits: `python -m benchmarks.run`, in the root."""
