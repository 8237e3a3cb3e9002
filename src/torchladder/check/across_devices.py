"""The hidden cases of the exercises on tensors and devices: chapters 03 and 04."""
