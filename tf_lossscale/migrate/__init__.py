"""Moving house: old source code, old checkpoints and old models.

The codemod's rooms: `names` (what is old, a table), `project` (which of a project's modules pass old names on), `tree`
and `resolve` (what a name means where it stands), `arguments` and `calls` (what a call becomes); `refusals`,
`policies`, `plan`, `objects`, `unseen` and `imports` (what is to be done, in this order), `edits` (where they note it),
`rewrite` (does it), `codemod` (one file), `files` (many files), `report`, `command`.
"""
