"""Reads, shows and restores old checkpoints and models.

The modules:

- `saved` defines the classes that represent the contents of a file, whatever its format.
- `object_graphs`, `savers` and `h5_files` each read one format, and `read` chooses between them. `live` reads an
  optimizer. `configs` reads an optimizer's config, which `.h5` files and live optimizers have.
- `slots` contains the slot names of each library. `matching` pairs the variables in a file with the user's variables.
- `targets` is access to the state of an optimizer. `notes` compares two optimizers. `restore` is built on all of these.
- `saver_names` maps the variable names in a TensorFlow 1 file to the variables of the current graph.
"""
