"""Drop-ins: the code that people already have runs on ours; each module imports its client only when used."""
