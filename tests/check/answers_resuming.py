"""Answers to the exercises of the cases in `resuming`; each says how it is judged."""
