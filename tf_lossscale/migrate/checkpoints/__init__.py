"""Functions that read, show, restore and convert old checkpoints and models.

`saved` (what a file holds, whatever its format), `object_graphs`, `savers` and `keras_files` (one reader per format),
`read` (finds the reader); `slots` (what the same slot is called in each library, and what differs), `matching` (which
variable of the file is which of yours), `restore`, and `saver_names` for optimizers of TensorFlow 1.
"""
