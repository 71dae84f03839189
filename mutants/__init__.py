"""Mutation testing: finds code of a module that could be wrong without a failing test (`make mutants FILE=...`)."""
