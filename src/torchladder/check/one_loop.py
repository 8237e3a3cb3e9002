"""The hidden cases of the exercises on one device's training loop: chapters 05 to 07."""
