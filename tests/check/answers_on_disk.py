"""Answers to the exercises of the cases in `on_disk`; each says how it is judged."""
