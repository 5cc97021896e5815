"""What a kernel does, counted without a GPU or a clock, against what it is expected to do."""
