"""The hidden cases of the exercises on memory and sharding: chapters 11 to 14."""
