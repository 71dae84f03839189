"""Functions that read, show, restore and convert old checkpoints and models.

The modules:

- `saved` describes the contents of a file in any format.
- `object_graphs`, `savers` and `keras_files` each read one format, and `read` chooses the reader.
- `slots` knows the slot names and update formulas of each library, and `matching` pairs the variables in a file with
  the user's variables.
- `restore` and `convert` use all of these, and `saver_names` maps the variable names of TensorFlow 1.
"""
