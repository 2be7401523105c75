"""Exercises: programs with something missing, and checks that say what. `python -m exercises`."""
