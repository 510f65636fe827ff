"""What is run: each workload turns (spec, recipe, cell) into a zero-argument step for the clock."""
