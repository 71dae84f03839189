"""Functions that read, show, restore and convert old checkpoints and models.

`saved` (what a file holds, whatever its format), `object_graphs`, `savers` and `keras_files` (one reader per format),
`read` (finds the reader); `slots` (the slot names of each library, and differences of the formulas), `matching`
(pairs the variables of a file with the user's), `restore`, and `saver_names` for optimizers of TensorFlow 1.
"""
