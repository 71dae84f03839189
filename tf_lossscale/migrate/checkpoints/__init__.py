"""Reads, shows and restores old checkpoints and models.

The modules:

- `saved` defines the classes that represent the contents of a file, whatever its format.
- `object_graphs`, `savers` and `keras_files` each read one family of formats. `read` chooses between them.
  `keras_order` finds the order of the variables in a `.keras` file.
- `slots` contains the slot names of each library. `matching` pairs the variables in a file with the user's variables.
- `targets` is access to the state of the optimizer to restore into, and `restore` is built on these modules.
  `saver_names` maps the variable names in a TensorFlow 1 file to
  the variables of the current graph.
"""
