"""What is read from and written to disk, whole or not at all.

`torch_file` opens files of PyTorch, whose pickle `state_pickle` reads without running it;
:mod:`wdjax.models.convert` makes models of what they return. `persist` saves pytrees as safetensors
and folders with manifests; `archive` reads zip members within bounds; `atomic` writes files whole,
and holds their locks. Open `torch_file` or `persist` first.
"""
