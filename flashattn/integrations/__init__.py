"""Attention under the names and conventions of other libraries; import a module to use it."""
