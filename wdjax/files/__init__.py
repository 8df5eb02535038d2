"""What is read from and written to disk, whole or not at all.

`convert` loads PyTorch weights: `torch_file` opens the archive, `state_pickle` reads its pickle
without running it. `persist` saves pytrees as safetensors and folders with manifests; `archive`
reads zip members within bounds; `atomic` writes files whole, and holds their locks. Open `convert`
first.
"""
