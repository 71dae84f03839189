"""Mutation testing: which lines of a module could be wrong without a failing test (`make mutants FILE=...`)."""
