"""Reads untrusted files without executing them, and writes files whole or not at all.

Reading weights: `torch_file` recognises a file by its first bytes and reads PyTorch's zip and
legacy formats and safetensors. `archive` reads the members of a zip file, with bounds on the sizes
that it claims; `state_pickle` interprets the pickle inside without executing it, and leaves handles
that `torch_file` replaces by arrays. :mod:`wdjax.models.convert` makes models of these arrays.
`onnx_file` reads ONNX files, whose graphs :mod:`wdjax.models` turns into models; `vnnlib_file`
reads the properties of VNN-LIB, and `vnnlib_typed` those of its version 2.0.

Writing: `persist` saves pytrees (models, searches, checkpoints) as a safetensors file or as a
folder, with a manifest of checksums, and restores them strictly; `atomic` replaces a file in one
step, and locks it against other processes.

Open `torch_file` to read, `persist` to save. To add a reader: a file here that returns arrays by
name; ``_reader`` of `torch_file` chooses it by the file's first bytes, so that ``torch_file.read``,
and with it :mod:`wdjax.models.convert` and the command line, can open such files.
"""
