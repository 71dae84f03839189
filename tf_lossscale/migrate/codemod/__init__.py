"""The codemod. It rewrites source code that uses old names from TensorFlow and Keras, and reports what it leaves.

A file is migrated in this order; each step is a module or two:

1. `source` parses the file with Python's `ast`, and knows the place of each node in the text. `scopes` resolves names
   through imports and aliases.
2. `uses` finds the uses of old names, which are in `tf_lossscale.legacy.table`. `old_state` finds the code that needs
   the old loss scale object, and `keras_3` the code that needs Keras 3's class.
3. `rules` plans an edit or a finding for each use, with `wrappers` for the wrapper classes and `policies` for dtype
   policies. `class_tests` reports tests with another result, and `unseen` reports what the rules do not see.
   A `Project` in `uses` says what this depends on in other files.
4. `imports` plans the edits to the imports.
5. `edits` applies all edits to the text, and `migrate_file` parses the result again.

A place where the program may fail or compute other numbers gets a TODO comment in the file, because a notice is gone
once the file has been written. A notice is for a place where today's TensorFlow raises an error if a change is needed.

`files` finds and writes the files of a project, `notebooks` converts notebooks to modules and back, `report` defines
the results, and `command` is the command line. `names` has constants.
"""
