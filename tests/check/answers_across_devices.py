"""Answers to the exercises of the cases in `across_devices`; each says how it is judged."""
