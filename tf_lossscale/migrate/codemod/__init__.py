"""The codemod: rewrites source code that uses old names, and reports each of these uses.

Its modules, in the order of use:

- Handling many files: `command`, `files`, `bindings` (reads the names that a file defines), `project` (finds the files
  that use or re-export old names), `notebooks`, `report`, `repositories` (finds the files that Git could not restore).
- Migrating one file: `migrate_file`.
- Resolving a name in the code: `tf_lossscale.legacy.table` (the table of old names), `names`, `tree`, `resolve`.
- Translating a call: `arguments`, `calls`.
- Planning the changes, in running order: `policies`, `plan`, `objects`, `strategies`, `unseen`, `imports`.
- Applying the changes: `edits` stores the planned changes, and `rewrite` applies them to the syntax tree.
"""
