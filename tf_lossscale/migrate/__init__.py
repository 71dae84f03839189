"""Moving house: old source code, old checkpoints and old models.

The codemod's rooms: `names` (what is old, a table), `project` (which of a project's modules pass old names on),
`resolve` (what a name means where it stands), `arguments` (old arguments to new ones), `plan` (what to do with every
use), `imports`, `policies`, `rewrite` (does it), `codemod` (one file), `files` (many files), `report`, `command`.
"""
