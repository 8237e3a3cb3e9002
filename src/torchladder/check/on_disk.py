"""The hidden cases of the exercises on files: chapters 01 and 02."""
