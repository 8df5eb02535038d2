"""Reads and writes files, whole or not at all.

`torch_file` opens PyTorch's files, whose pickles `state_pickle` interprets without executing them,
and `onnx_file` opens ONNX files;
:mod:`wdjax.models.convert` makes models of what they return. `persist` saves pytrees as safetensors
files or as folders with manifests; `archive` reads zip members with bounds on their size; `atomic`
replaces files atomically, and locks them. `vnnlib_file` reads properties. Open `torch_file` or
`persist` first.
"""
