"""The hidden cases of the exercises on use and several machines: chapters 17 and 18."""
