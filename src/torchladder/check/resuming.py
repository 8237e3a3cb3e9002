"""The hidden cases of the exercises on checkpoints and resuming: chapters 15 and 16."""
