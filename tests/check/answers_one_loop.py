"""Answers to the exercises of the cases in `one_loop`; each says how it is judged."""
