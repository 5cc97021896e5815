"""Reports of saved runs: tables, plots and a page. Needs neither torch nor Triton."""
