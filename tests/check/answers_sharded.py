"""Answers to the exercises of the cases in `sharded`; each says how it is judged."""
