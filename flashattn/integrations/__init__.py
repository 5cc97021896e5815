"""Drop-in replacements: existing code that calls another attention API runs on our kernels.

Each module imports the library that it serves only when the module is used.
"""
