"""The codemod: old source code in, new source code and findings out.

In the order of use:

- Many files: `command`, `files`, `sources` (a text search), `notebooks`, `project` (which modules pass old names on),
  `report`, `repositories` (files that Git could not give back).
- One file: `migrate_file`.
- What a name refers to at a place in the code: `tf_lossscale.legacy.table` (the old names), `names`, `tree`, `resolve`.
- What a call becomes: `arguments`, `calls`.
- The plan of the changes, in the order of running: `policies`, `plan`, `objects`, `strategies`, `unseen`,
  `imports`.
- The changes: `edits` holds them, `rewrite` makes them.
"""
