"""`python -m tools.mutants FILE`: finds code of a module that could be wrong without a failing test."""
