"""Drop-ins: the code that people already have runs on ours.

Each module imports its client only when used.
"""
