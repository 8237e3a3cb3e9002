"""Answers to the exercises of the cases in `in_use`; each says how it is judged."""
