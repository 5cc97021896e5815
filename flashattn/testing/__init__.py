"""Code that tests share: ours, and those of anyone who registers an implementation."""
