"""The codemod. It rewrites source code that uses old names from TensorFlow and Keras, and reports each of these uses.

These modules handle many files:

- `command` implements the command line, `files` finds and writes the files, and `report` defines the classes that
  represent the results.
- `bindings` reads the names that a file defines, and `project` finds the files that use or re-export old names.
- `notebooks` converts notebooks to modules, and `repositories` finds the files that Git could not restore.

These modules migrate one file:

- `migrate_file` calls the other modules.
- `tree`, `names` and `resolve` find out what a name in the code means. The old names are in
  `tf_lossscale.legacy.table`.
- `arguments` and `calls` translate calls.
- `policies`, `plan`, `objects`, `strategies`, `unseen` and `imports` plan the edits, in this order.
- `edits` stores the planned edits, and `rewrite` applies them to the syntax tree.
"""
