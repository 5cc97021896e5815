"""Saved runs as tables, pictures and a page; a laptop reads them: no torch, no Triton."""
