"""The codemod: rewrites source code that uses old names, and reports each of these uses.

Its modules, in the order of use:

- Many files: `command`, `files`, `bindings` (names that a file binds), `project` (a text search, and files that
  re-export old names), `notebooks`, `report`, `repositories` (files that Git cannot restore).
- One file: `migrate_file`.
- The meaning of a name at a place in the code: `tf_lossscale.legacy.table` (the old names), `names`, `tree`, `resolve`.
- The new form of a call: `arguments`, `calls`.
- The plan of the changes, in running order: `policies`, `plan`, `objects`, `strategies`, `unseen`,
  `imports`.
- The changes: `edits` holds them, and `rewrite` applies them.
"""
