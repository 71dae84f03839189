"""The codemod: old source code in, new source code and findings out.

In the order of use: `names` (the table of old names), `project` (which modules of a project pass old names on),
`nesting` (what can be parsed), `tree` and `resolve` (what a name refers to at a place in the code), `arguments` and
`calls` (what a call becomes); `policies`, `plan`, `objects`, `unseen` and `imports` (plan the changes), `edits` (hold
them), `rewrite` (makes them), `migrate_file` (one file), `files` (many files), `report`, `command`.
"""
